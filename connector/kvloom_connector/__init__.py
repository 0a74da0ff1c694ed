"""The vLLM connector: returns over NIXL that are verified, leased and shared.

vLLM loads it with ``"kv_connector": "NixlConnector"`` and
``"kv_connector_module_path": "kvloom_connector.connector"``.
"""
