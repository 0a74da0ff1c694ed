"""The router and the local cluster."""
