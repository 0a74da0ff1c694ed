"""The vLLM connector: verified, leased returns over NIXL."""
