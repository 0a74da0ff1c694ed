"""How an engine's KV memory is split, from what vLLM says of itself."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvloom_server.router.memory import Reading, read_page, split

PAGE = """\
# HELP vllm:num_requests_running Number of requests in model execution batches.
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0",model_name="m"} 3.0
vllm:num_requests_waiting{engine="0",model_name="m"} 1.0
vllm:kv_cache_usage_perc{engine="0",model_name="m"} 0.6
vllm:cache_config_info{block_size="16",engine="0",num_gpu_blocks="1000",x="{}"} 1.0
vllm:kvloom_leased_blocks{engine="0",model_name="m"} 250.0
vllm:kvloom_leases{engine="0",model_name="m"} 4.0
vllm:e2e_request_latency_seconds_bucket{engine="0",le="0.3"} 12.0
"""


def test_vllms_page_is_read():
    """Usage, leased blocks, their number, who runs and who waits."""
    assert read_page(PAGE) == Reading(
        held_share=0.6, leased_blocks=250, num_blocks=1000, running=3, waiting=1
    )


def test_ranks_behind_one_page_are_taken_together():
    """Blocks add up, usage is the mean."""
    other = PAGE.replace('engine="0"', 'engine="1"').replace(" 0.6", " 0.2")
    reading = read_page(PAGE + other)
    assert reading is not None
    assert reading.held_share == pytest.approx(0.4)
    assert (reading.num_blocks, reading.leased_blocks) == (2000, 500)


def test_a_stock_engine_says_nothing_of_leases():
    """Free and in use are known all the same."""
    stock = "\n".join(x for x in PAGE.splitlines() if "kvloom" not in x)
    reading = read_page(stock)
    assert reading is not None
    assert reading.leased_blocks is None
    shares = split(reading, num_leases=None)
    assert (shares.in_use, shares.leased) == (0.6, 0.0)


@pytest.mark.parametrize(
    "page", ["", "<html>", "go_goroutines 7", "vllm:kv_cache_usage_perc NaN"]
)
def test_what_is_not_vllms_is_nothing(page):
    """No numbers are made up."""
    assert read_page(page) is None


@given(st.text())
def test_any_page_can_be_read(text):
    """Whatever an engine answers."""
    read_page(text)


readings = st.builds(
    Reading,
    held_share=st.floats(0, 1),
    leased_blocks=st.none() | st.integers(0, 5000),
    num_blocks=st.none() | st.integers(1, 1000),
    running=st.integers(0, 9),
    waiting=st.integers(0, 9),
)


@given(readings, st.none() | st.integers(0, 3))
def test_shares_add_up(reading, num_leases):
    """To one, and none is below nothing."""
    shares = split(reading, num_leases=num_leases)
    assert shares.free + shares.in_use + shares.leased == pytest.approx(1)
    assert min(shares.free, shares.in_use, shares.leased) >= -1e-9


def test_the_feed_knows_better_than_an_idle_engine():
    """Whose last step may be long ago: without leases nothing is leased."""
    stale = read_page(PAGE.replace(" 0.6", " 0.25"))
    assert stale is not None
    shares = split(stale, num_leases=0)
    assert (shares.in_use, shares.leased, shares.free) == (0, 0, 1)
