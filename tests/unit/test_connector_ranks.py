"""The ranks of a data-parallel server: an engine each, with a lease service each."""

import warnings
from types import SimpleNamespace

import pytest

from kvloom_connector.settings import ConnectorSettings, SettingsError, service_port

BLOCK_SIZE = 4
SIDE_PORT = 5600


@pytest.mark.parametrize("lease_port", [0, 6601])
def test_no_two_ranks_of_a_server_want_the_same_port(lease_port):
    """They read the same settings; with a port of one's own choice, too, the second
    rank starts."""
    written = ConnectorSettings(lease_port=lease_port)
    # vLLM counts the side channel's port up.
    ports = [service_port(written.at_rank(n), SIDE_PORT + n) for n in range(4)]
    first = lease_port or SIDE_PORT + 1000
    assert ports == [first, first + 1, first + 2, first + 3]


def test_a_rank_without_a_port_is_told_so():
    """And not by the operating system."""
    with pytest.raises(SettingsError, match="lease_port=65536"):
        ConnectorSettings(lease_port=65535).at_rank(1)


def test_vllms_rank_decides_where_an_engine_listens(monkeypatch):
    """What an engine tells its peers of itself is its own rank's lease service."""
    pytest.importorskip("vllm", reason="the engine is not installed")
    monkeypatch.setenv("VLLM_NIXL_SIDE_CHANNEL_PORT", str(SIDE_PORT))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole

        from kvloom_connector.connector import NixlConnector

        for rank in (0, 3):
            made = NixlConnector(
                config(rank, lease_port=6601), KVConnectorRole.SCHEDULER, layout()
            )
            scheduler = made.connector_scheduler
            assert scheduler.side_channel_port == SIDE_PORT + rank
            assert scheduler._confirm_at.endswith(f":{6601 + rank}")
            scheduler.shutdown()


def config(rank, **extra):
    """As much of vLLM's configuration as the scheduler half reads."""
    return SimpleNamespace(
        parallel_config=SimpleNamespace(
            tensor_parallel_size=1,
            prefill_context_parallel_size=1,
            decode_context_parallel_size=1,
            pipeline_parallel_size=1,
            data_parallel_index=rank,
        ),
        cache_config=SimpleNamespace(block_size=BLOCK_SIZE),
        kv_transfer_config=SimpleNamespace(
            engine_id="engine",
            kv_role="kv_consumer",
            is_kv_consumer=True,
            kv_buffer_device="cpu",
            kv_connector_extra_config=extra,
            get_from_extra_config=lambda key, default: extra.get(key, default),
        ),
        scheduler_config=SimpleNamespace(disable_hybrid_kv_cache_manager=False),
    )


def layout():
    """One group of full attention."""
    from torch import float32
    from vllm.v1.kv_cache_interface import (
        FullAttentionSpec,
        KVCacheConfig,
        KVCacheGroupSpec,
    )

    spec = FullAttentionSpec(
        block_size=BLOCK_SIZE, num_kv_heads=1, head_size=1, dtype=float32
    )
    return KVCacheConfig(
        num_blocks=2,
        kv_cache_tensors=[],
        kv_cache_groups=[KVCacheGroupSpec(["layer"], spec)],
    )
