"""Handles that only this router can open."""

from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from kvloom.protocol import MAX_HANDLE_CHARS, is_handle
from kvloom_server.router.seal import Binding, HandleMiss, Sealed, Sealer

NOW = 1_000.0
INSIDE = Sealed(
    lease_id="ab" * 16, engine=b"engine 0", num_tokens=1234, deadline_unix=NOW + 60
)
BINDING = Binding(conversation=b"8 bytes.", model="m", tenant="t")
SEALER = Sealer([b"a secret of at least sixteen bytes"])


@given(
    st.binary(min_size=16, max_size=16),
    st.integers(0, 2**32 - 1),
    st.floats(NOW + 1, 1e12),
    st.text(max_size=30),
)
def test_a_handle_opens_to_what_was_sealed(
    lease_id: bytes, num_tokens: int, deadline: float, model: str
) -> None:
    """What the client brings back is what it was given, in constant size."""
    inside = Sealed(
        lease_id=lease_id.hex(),
        engine=b"engine 0",
        num_tokens=num_tokens,
        deadline_unix=deadline,
    )
    binding = replace(BINDING, model=model)
    handle = SEALER.seal(inside, binding)
    assert is_handle(handle)
    assert len(handle) == len(SEALER.seal(INSIDE, BINDING)) < MAX_HANDLE_CHARS
    assert SEALER.open(handle, binding, NOW) == inside


@given(st.data())
def test_a_changed_handle_is_a_miss(data: st.DataObject) -> None:
    """No change of a handle, however small, opens or raises."""
    handle = SEALER.seal(INSIDE, BINDING)
    at = data.draw(st.integers(5, len(handle) - 1))
    letter = data.draw(st.sampled_from("ABCabc019_-"))
    changed = handle[:at] + letter + handle[at + 1 :]
    opened = SEALER.open(changed, BINDING, NOW)
    # The last letter of base64 has bits that stand for nothing.
    assert isinstance(opened, HandleMiss) or opened == INSIDE


@given(st.text(max_size=300))
def test_anything_else_is_a_miss(text: str) -> None:
    """A handle of another program, or none at all, never raises."""
    assert isinstance(SEALER.open(text, BINDING, NOW), HandleMiss)


def test_a_handle_of_another_is_a_miss_that_says_why() -> None:
    """A handle works for its own conversation, model and tenant only."""
    handle = SEALER.seal(INSIDE, BINDING)
    wrong = {
        HandleMiss.OTHER_CONVERSATION: replace(BINDING, conversation=b"another."),
        HandleMiss.OTHER_MODEL: replace(BINDING, model="other"),
        HandleMiss.OTHER_TENANT: replace(BINDING, tenant="other"),
    }
    for miss, binding in wrong.items():
        assert SEALER.open(handle, binding, NOW) is miss
    assert SEALER.open(handle, BINDING, NOW + 60) is HandleMiss.EXPIRED


def test_a_handle_of_another_key_is_a_miss() -> None:
    """Handles of another cluster, or from before a random key, do not open."""
    handle = SEALER.seal(INSIDE, BINDING)
    assert isinstance(Sealer.with_random_key().open(handle, BINDING, NOW), HandleMiss)


def test_an_old_key_still_opens_while_keys_are_rotated() -> None:
    """Changing the key loses no conversation as long as the old one is listed."""
    old, new = b"the old secret, long enough", b"the new secret, long enough"
    handle = Sealer([old]).seal(INSIDE, BINDING)
    assert Sealer([new, old]).open(handle, BINDING, NOW) == INSIDE
    assert isinstance(Sealer([new]).open(handle, BINDING, NOW), HandleMiss)


def test_equal_leases_get_unequal_handles() -> None:
    """Nobody can tell from two handles whether they mean the same."""
    assert SEALER.seal(INSIDE, BINDING) != SEALER.seal(INSIDE, BINDING)


def test_a_handle_of_another_cluster_is_a_miss() -> None:
    """Two clusters may share a secret, and even have the same addresses."""
    secret = b"a secret of at least sixteen bytes"
    handle = Sealer([secret], cluster="east").seal(INSIDE, BINDING)
    assert Sealer([secret], cluster="east").open(handle, BINDING, NOW) == INSIDE
    for other in (Sealer([secret], cluster="west"), Sealer([secret])):
        assert isinstance(other.open(handle, BINDING, NOW), HandleMiss)
