"""What the connector leans on inside vLLM, held against the installed vLLM.

An upgrade that moves something fails here, with its name. No engine is started.
"""

import inspect
import re
import warnings
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace

import pytest

from kvloom_connector.digest import ladder
from kvloom_connector.settings import UPSTREAM_KEYS, ConnectorSettings

NIXL = "vllm.distributed.kv_transfer.kv_connector.v1.nixl"
BLOCK_SIZE = 4
NUM_BLOCKS = 10  # of the pool, less the one that vLLM keeps empty


def imported(name):
    """A module of vLLM's, whose imports warn about each other."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return import_module(name)


@pytest.fixture(scope="module", autouse=True)
def hooks():
    """The connector's own knowledge of vLLM."""
    pytest.importorskip("vllm", reason="the engine is not installed")
    return imported("kvloom_connector.vllm_hooks")


SIGNATURES = {
    "vllm.v1.core.block_pool:BlockPool": {
        "touch": "self, blocks",
        "free_blocks": "self, ordered_blocks",
        "get_num_free_blocks": "self",
    },
    "vllm.v1.core.kv_cache_manager:KVCacheManager": {
        "get_computed_blocks_for_connector": "self, request",
    },
    "vllm.v1.core:kv_cache_utils": {
        "generate_block_hash_extra_keys": (
            "request, start_token_idx, end_token_idx, start_mm_idx"
        ),
    },
    f"{NIXL}.connector:NixlBaseConnector": {
        "__init__": "self, vllm_config, role, kv_cache_config",
        "bind_kv_cache_manager": "self, kv_cache_manager",
        "request_finished_all_groups": "self, request, block_ids",
    },
    f"{NIXL}.pull_scheduler:NixlPullConnectorScheduler": {
        "__init__": "self, vllm_config, engine_id, kv_cache_config",
        "on_new_request": "self, request",
        "get_num_new_matched_tokens": "self, request, num_computed_tokens",
        "update_state_after_alloc": "self, request, blocks, num_external_tokens",
        "update_connector_output": "self, connector_output",
        "request_finished": "self, request, block_ids",
        "build_connector_meta": "self, scheduler_output",
        "_stop_heartbeat": "self, req_id",
        "shutdown": "self",
    },
    f"{NIXL}.pull_worker:NixlPullConnectorWorker": {
        "__init__": "self, vllm_config, engine_id, kv_cache_config",
    },
}


def looked_up(place):
    module, _, path = place.partition(":")
    found = imported(module)
    for name in path.split("."):
        found = getattr(found, name)
    return found


@pytest.mark.parametrize(
    ("place", "name", "arguments"),
    [(place, *pair) for place, names in SIGNATURES.items() for pair in names.items()],
)
def test_signature(place, name, arguments):
    """vLLM still calls, and is called, with these arguments."""
    found = inspect.signature(getattr(looked_up(place), name))
    assert ", ".join(found.parameters) == arguments


def test_allocation_is_where_blocks_run_out():
    """``allocate_slots`` says ``None`` when there are no free blocks; that is
    where leases are given up."""
    allocate = looked_up("vllm.v1.core.kv_cache_manager:KVCacheManager.allocate_slots")
    assert "None" in str(inspect.signature(allocate).return_annotation)


def test_the_supported_version_is_the_installed_one(hooks):
    """The connector starts in this vLLM, and says so in any other."""
    hooks.check_version()
    for version in ("0.31.2", "0.33.0", "1.32.0", "0.320.0", "dev"):
        with pytest.raises(hooks.UnsupportedVersionError, match=r"supports vLLM 0\.32"):
            hooks.check_version(version)
    hooks.check_version("0.32.1.post1+cpu")


def test_the_connector_is_loaded_as_the_stock_one():
    """Same name, same base: vLLM's special cases for NIXL apply to it."""
    ours = imported("kvloom_connector.connector").NixlConnector
    stock = imported(f"{NIXL}.connector")
    assert ours.__name__ == "NixlConnector"
    assert ours.__mro__[1:3] == (stock.NixlPullConnector, stock.NixlBaseConnector)
    assert ours.request_finished_all_groups is (
        stock.NixlBaseConnector.request_finished_all_groups
    )


def test_settings_reach_vllm_under_its_own_names():
    """Whatever stock NIXL reads of ``kv_connector_extra_config`` may be set,
    and nothing passes as upstream's that upstream does not read."""
    folder = Path(imported(NIXL).__file__).parent
    source = "".join(file.read_text() for file in folder.glob("*.py"))
    read = set(re.findall(r'get_from_extra_config\(\s*"(\w+)"', source))
    read -= {"push_registration_timeout"}  # the push connector's
    ours = set(ConnectorSettings.__slots__)
    assert read - ours == UPSTREAM_KEYS
    config = imported("vllm.config.kv_transfer").KVTransferConfig(
        kv_connector="NixlConnector", kv_role="kv_consumer"
    )
    assert config.kv_load_failure_policy == "fail"
    assert config.is_kv_consumer
    assert config.kv_connector_extra_config == {}


def test_nixls_progress_thread_can_be_slowed():
    """The agent is made from the binding's class, looked up in its module,
    with a pause that can be set on its config."""
    wrapper = imported("vllm.distributed.nixl_utils").NixlWrapper
    if wrapper is None:
        pytest.skip("NIXL is not installed")
    bindings = imported(wrapper.__module__).nixlBind
    assert callable(bindings.nixlAgent)
    config = bindings.nixlAgentConfig()
    config.pthrDelay = 1000
    assert config.pthrDelay == 1000
    assert {"nixlBind", "nixlAgent"} <= set(wrapper.__init__.__code__.co_names)
    assert callable(wrapper.get_new_notifs)
    worker = looked_up(f"{NIXL}.base_worker:NixlBaseConnectorWorker.__init__")
    assert "nixl_wrapper" in worker.__code__.co_names


def cache_config():
    """One group of full attention over a small pool."""
    interface = imported("vllm.v1.kv_cache_interface")
    spec = interface.FullAttentionSpec(
        block_size=BLOCK_SIZE,
        num_kv_heads=1,
        head_size=1,
        dtype=imported("torch").float32,
    )
    return interface.KVCacheConfig(
        num_blocks=NUM_BLOCKS + 1,
        kv_cache_tensors=[],
        kv_cache_groups=[interface.KVCacheGroupSpec(["layer"], spec)],
    )


def test_private_fields_of_the_stock_scheduler():
    """What our half reads of a stock scheduler is there, and of one group of
    full attention it says that returns are possible."""
    parallel = SimpleNamespace(
        tensor_parallel_size=1,
        decode_context_parallel_size=1,
        pipeline_parallel_size=1,
        data_parallel_index=0,
    )
    config = SimpleNamespace(
        parallel_config=parallel,
        cache_config=SimpleNamespace(block_size=BLOCK_SIZE),
        kv_transfer_config=SimpleNamespace(
            kv_buffer_device="cpu", get_from_extra_config=lambda key, default: default
        ),
        scheduler_config=SimpleNamespace(disable_hybrid_kv_cache_manager=False),
    )
    scheduler = looked_up(f"{NIXL}.pull_scheduler:NixlPullConnectorScheduler")(
        config, "engine", cache_config()
    )
    assert scheduler.vllm_config is config
    assert scheduler.engine_id == "engine"
    assert scheduler.block_size == BLOCK_SIZE
    assert scheduler.transfer_tp_size == 1
    assert isinstance(scheduler.side_channel_host, str)
    assert isinstance(scheduler.side_channel_port, int)
    assert scheduler._is_hma_required is False
    assert scheduler._has_mamba is False
    assert isinstance(scheduler.use_host_buffer, bool)
    assert scheduler._reqs_in_batch == set()


def request_of(tokens, *, request_id="r", **options):
    """A real request of vLLM's, its blocks hashed as an engine hashes them."""
    utils = imported("vllm.v1.core.kv_cache_utils")
    sha256 = imported("vllm.utils.hashing").sha256
    utils.init_none_hash(sha256)
    return imported("vllm.v1.request").Request(
        request_id,
        list(tokens),
        imported("vllm.sampling_params").SamplingParams(max_tokens=50),
        None,
        block_hasher=utils.get_request_block_hasher(BLOCK_SIZE, sha256),
        **options,
    )


# Tokens with the last sampled one, vLLM's count, placeholders, tokens with KV.
ENDS = {
    "sync_eos": (204, 203, 0, 203),
    "length": (203, 202, 0, 202),
    "async_eos": (204, 204, 1, 203),
    "drafts_after_eos": (210, 211, 0, 209),
    "async_drafts_after_eos": (210, 215, 6, 209),
    "preempted": (100, 0, 0, 0),
    "aborted_in_prefill": (100, 64, 0, 64),
    "nothing_written": (100, 0, 1, 0),
}
IN_FLIGHT = {
    "async_eos": (204, 204, 1, 1, 203),
    "drafts_under_way": (210, 215, 6, 6, 209),
    "a_chunk_is_computed_again": (100, 64, 0, 64, 0),
    "its_last_chunk": (100, 100, 1, 36, 64),
    "two_steps": (204, 205, 2, 2, 203),
}


@pytest.mark.parametrize(
    ("num_tokens", "computed", "placeholders", "valid"), ENDS.values(), ids=ENDS
)
def test_only_tokens_whose_kv_exists_count(
    hooks, num_tokens, computed, placeholders, valid
):
    """However a turn ends: never the last sampled token, a rejected draft or a
    step under way, which stock vLLM counts."""
    request = request_of(range(90))
    request.append_output_token_ids(list(range(num_tokens - 90)))
    request.num_computed_tokens = computed
    request.num_output_placeholders = placeholders
    assert hooks.num_valid_tokens(request) == valid


@pytest.mark.parametrize(
    ("num_tokens", "computed", "placeholders", "in_flight", "valid"),
    IN_FLIGHT.values(),
    ids=IN_FLIGHT,
)
def test_steps_that_are_under_way_have_written_nothing(
    hooks, num_tokens, computed, placeholders, in_flight, valid
):
    """An abort comes at any time; what is computed just then must not be read."""
    request = request_of(range(90))
    request.append_output_token_ids(list(range(num_tokens - 90)))
    request.num_computed_tokens = computed
    request.num_output_placeholders = placeholders
    request.num_in_flight_tokens = in_flight
    assert hooks.num_valid_tokens(request) == valid


def test_only_turns_that_ended_by_themselves_leave_kv(hooks):
    """A stop token, a stop string or the length are sound; the rest says what
    it was."""
    statuses = imported("vllm.v1.request").RequestStatus
    request = request_of(range(9))
    said = {}
    for status in statuses:
        request.status = status
        said[status.name] = hooks.finish_reason(request)
    assert [name for name, why in said.items() if why is None] == [
        "FINISHED_STOPPED",
        "FINISHED_LENGTH_CAPPED",
    ]
    assert said["FINISHED_ABORTED"] == "finished_aborted"


def test_only_a_token_ends_an_answer_that_is_told(hooks):
    """Not its length, not an abort: then its last token is one of its words."""
    statuses = imported("vllm.v1.request").RequestStatus
    request = request_of(range(9))
    ended = []
    for status in statuses:
        request.status = status
        if hooks.ended_at_token(request):
            ended.append(status.name)
    assert ended == ["FINISHED_STOPPED"]
    request.append_output_token_ids([7, 8])
    assert list(request.output_token_ids) == [7, 8]


def extras(hooks, tokens=tuple(range(10)), **options):
    request = request_of(tokens, **options)
    return hooks.extra_digests(request, num_tokens=len(tokens), block_size=BLOCK_SIZE)


def test_what_else_shapes_a_block(hooks):
    """Salt, LoRA and images are part of the proof; plain text has none."""
    assert extras(hooks) == ()
    first, *others = extras(hooks, cache_salt="tenant")
    assert first
    assert others == [b"", b""]
    assert extras(hooks, cache_salt="another")[0] != first
    lora = imported("vllm.lora.request").LoRARequest("style", 1, "/nowhere")
    assert all(extras(hooks, lora_request=lora))


def image(hooks, name, *, offset, length):
    inputs = imported("vllm.multimodal.inputs")
    place = inputs.PlaceholderRange(offset=offset, length=length)
    feature = inputs.MultiModalFeatureSpec(
        data=None, modality="image", identifier=name, mm_position=place
    )
    return extras(hooks, mm_features=[feature])


def test_another_image_is_another_history(hooks):
    """The same placeholder tokens with another picture, or at another place,
    have other digests from the picture's block on."""
    cat = image(hooks, "cat", offset=5, length=2)
    assert [bool(extra) for extra in cat] == [False, True, False]
    assert image(hooks, "dog", offset=5, length=2) != cat
    assert image(hooks, "cat", offset=4, length=2) != cat


def test_another_tenants_digests_share_no_block(hooks):
    """A salt changes the first block, and the chain carries it on."""
    tokens = tuple(range(12))
    ladders = [
        ladder(tokens, block_size=BLOCK_SIZE, extras=extras(hooks, tokens, **salt))
        for salt in ({}, {"cache_salt": "a"}, {"cache_salt": "b"})
    ]
    rungs = [rung for rungs in ladders for rung in re.findall(rb"(?s).{16}", rungs)]
    assert len(rungs) == len(set(rungs)) == 9


@pytest.fixture
def manager():
    """A real cache manager over a small pool."""
    make = imported("vllm.v1.core.kv_cache_manager").KVCacheManager
    return make(
        cache_config(),
        max_model_len=64,
        scheduler_block_size=BLOCK_SIZE,
        hash_block_size=BLOCK_SIZE,
    )


def run(manager, request):
    """Admit a request and compute it whole; its block ids, or ``None``."""
    _, num_hit, *_ = found = manager.get_computed_blocks(request)
    blocks = manager.allocate_slots(
        request, request.num_tokens - num_hit, num_hit, found[0]
    )
    if blocks is None:
        return None
    request.num_computed_tokens = request.num_tokens
    return manager.get_block_ids(request.request_id)[0]


def test_a_hold_outlives_its_request(hooks, manager):
    """vLLM releases the request at once; the blocks stay until they are given
    back, and then serve as prefix cache."""
    hold = hooks.BlockHold(manager, lambda: False, lambda: None)
    assert hold.num_blocks == NUM_BLOCKS + 1
    request = request_of(range(12))
    blocks = run(manager, request)
    hold.keep(blocks)
    manager.free(request)
    assert hold.num_free_blocks == NUM_BLOCKS - 3
    hold.give_back(blocks)
    assert hold.num_free_blocks == NUM_BLOCKS
    again = manager.get_computed_blocks(request_of(range(20), request_id="r2"))
    assert again[1] == 12


def test_two_holds_share_blocks(hooks, manager):
    """Two turns of one conversation hold the same first blocks: giving one
    up frees only what is its own."""
    hold = hooks.BlockHold(manager, lambda: False, lambda: None)
    turns = [request_of(range(9)), request_of(range(20), request_id="r2")]
    held = []
    for turn in turns:
        held.append(run(manager, turn))
        hold.keep(held[-1])
        manager.free(turn)
    assert held[0][:2] == held[1][:2]
    assert hold.num_free_blocks == NUM_BLOCKS - 6
    hold.give_back(held[0])
    assert hold.num_free_blocks == NUM_BLOCKS - 5
    hold.give_back(held[1])
    assert hold.num_free_blocks == NUM_BLOCKS
    assert all(block.ref_cnt == 0 for block in manager.block_pool.blocks[1:])


def test_a_prefix_outlives_what_follows_it(hooks, manager):
    """Blocks that were given back are reused from the tail on."""
    hold = hooks.BlockHold(manager, lambda: False, lambda: None)
    request = request_of(range(12))
    blocks = run(manager, request)
    hold.keep(blocks)
    manager.free(request)
    hold.give_back(blocks)
    other = request_of(range(100, 132), request_id="r2")
    assert blocks[2] in run(manager, other)
    again = manager.get_computed_blocks(request_of(range(20), request_id="r3"))
    assert again[1] == 8


def test_leases_give_way_before_a_request_waits(hooks, manager):
    """No free blocks: leases are given up one by one, no more than it takes,
    and the request is admitted."""
    held = []

    def give_up():
        if not held:
            return False
        hold.give_back(held.pop(0))
        return True

    hold = hooks.BlockHold(manager, give_up, lambda: None)
    for number in range(3):
        request = request_of(
            range(50 * number, 50 * number + 12), request_id=f"{number}"
        )
        held.append(run(manager, request))
        hold.keep(held[-1])
        manager.free(request)
    assert hold.num_free_blocks == 1
    new = request_of(range(900, 920), request_id="new")
    assert len(run(manager, new)) == 5
    assert len(held) == 1
    # What no lease can make room for waits, as without leases.
    assert run(manager, request_of(range(400, 424), request_id="big")) is None
    assert held == []


def test_the_prefix_cache_can_be_reset_while_turns_are_held(hooks, manager):
    """As after an update of weights: all leases go first, and nothing is found."""
    held = []

    def give_up_all():
        while held:
            hold.give_back(held.pop())

    hold = hooks.BlockHold(manager, lambda: False, give_up_all)
    request = request_of(range(12))
    held.append(run(manager, request))
    hold.keep(held[0])
    manager.free(request)
    assert manager.reset_prefix_cache()
    assert hold.num_free_blocks == NUM_BLOCKS
    again = manager.get_computed_blocks(request_of(range(20), request_id="r2"))
    assert again[1] == 0


def test_a_waiting_request_costs_no_lookup(hooks, manager):
    """While it waits vLLM finds nothing for it, and all of it afterwards."""
    first = request_of(range(12))
    run(manager, first)
    manager.free(first)
    waiting = {"r2"}
    hooks.spare_lookups(manager, lambda request: request.request_id in waiting)
    again = request_of(range(20), request_id="r2")
    blocks, num_hit, *_ = manager.get_computed_blocks_for_connector(again)
    assert (blocks.get_block_ids(), num_hit) == (([],), 0)
    waiting.clear()
    assert manager.get_computed_blocks_for_connector(again)[1] == 12
