"""A local cluster on one command: engines, router, and a model that is at hand."""
