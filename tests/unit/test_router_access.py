"""Who may do what at the router, and how keys are kept."""

import hashlib
from pathlib import Path

import pytest

from kvloom_server.keys import KeyFileError, read_api_keys
from kvloom_server.router.access import Access, Caller, KeyRing, is_loopback
from kvloom_server.router.errors import BadRequestError, RouterError
from kvloom_server.router.fields import FieldRules
from kvloom_server.router.request import Api, TurnRequest, parse_turn
from kvloom_server.router.tenancy import Tenancy

CLIENT, ADMIN = "client-key-0123456789", "admin-key-0123456789"
TURN, ENGINES, METRICS = "/v1/chat/completions", "/kvloom/engines", "/metrics"
CONVERSATION = "/kvloom/conversations/abc"
HERE = {"host": "127.0.0.1:8000"}


def ring(**keys: str) -> KeyRing:
    return KeyRing({hashlib.sha256(k.encode()).digest(): n for n, k in keys.items()})


def keyed(*, has_open_metrics: bool = True) -> Access:
    return Access(
        clients=ring(acme=CLIENT),
        admins=ring(ops=ADMIN),
        is_local=False,
        has_open_metrics=has_open_metrics,
    )


def keyless(*, is_local: bool = True) -> Access:
    return Access(clients=None, admins=None, is_local=is_local, has_open_metrics=True)


def bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


def refusal(access: Access, path: str, headers: dict[str, str]) -> int:
    with pytest.raises(RouterError) as refused:
        access.admit(path, headers)
    return refused.value.status


def test_a_clients_key_opens_the_models_and_nothing_else() -> None:
    """A user of the models is no operator."""
    access = keyed()
    assert access.admit(TURN, bearer(CLIENT)) == Caller(tenant="acme")
    assert access.admit(TURN, {"x-api-key": CLIENT}) == Caller(tenant="acme")
    assert refusal(access, ENGINES, bearer(CLIENT)) == 401


def test_an_admins_key_opens_the_admin_api_and_nothing_else() -> None:
    """An operator's key in a dashboard is no key for the models."""
    access = keyed()
    assert access.admit(ENGINES, bearer(ADMIN)) == Caller(is_admin=True)
    assert refusal(access, TURN, bearer(ADMIN)) == 401


def test_a_conversation_is_its_clients_to_end_or_an_admins() -> None:
    """Each tenant has its own, an admin may end anybody's."""
    access = keyed()
    assert access.admit(CONVERSATION, bearer(CLIENT)) == Caller(tenant="acme")
    assert access.admit(CONVERSATION, bearer(ADMIN)) == Caller(is_admin=True)
    assert refusal(access, CONVERSATION, {}) == 401


@pytest.mark.parametrize(
    "headers",
    [
        {},
        bearer(""),
        bearer(CLIENT + "x"),
        bearer(CLIENT[:-1]),
        {"authorization": CLIENT},
        {"authorization": f"Basic {CLIENT}"},
        bearer("schlüssel"),
        bearer("\udcff"),
    ],
)
@pytest.mark.parametrize(
    "path", [TURN, ENGINES, "/v1/models", "/anything", "//kvloom/"]
)
def test_without_the_key_nothing_opens(path: str, headers: dict[str, str]) -> None:
    """Nothing but the whole key, in its place, is the key."""
    assert refusal(keyed(), path, headers) == 401


def test_health_and_the_page_need_no_key() -> None:
    """Probes have none, and a browser can't send one before it has the page."""
    for path in ("/health", "/kvloom", "/kvloom/"):
        assert keyed().admit(path, {}) == Caller()


def test_metrics_are_open_or_an_admins() -> None:
    """As the operator chooses."""
    assert keyed().admit(METRICS, {}) == Caller()
    closed = keyed(has_open_metrics=False)
    assert refusal(closed, METRICS, bearer(CLIENT)) == 401
    assert closed.admit(METRICS, bearer(ADMIN)).is_admin


def test_without_admin_keys_only_this_machine_may_administer() -> None:
    """A router that others reach has no open admin API."""
    assert keyless().admit(ENGINES, HERE).is_admin
    assert keyless().admit(ENGINES, {"host": "localhost:1"}).is_admin
    assert refusal(keyless(is_local=False), ENGINES, HERE) == 403


@pytest.mark.parametrize(
    "headers",
    [
        {"host": "evil.example:8000"},
        {"host": ""},
        {"host": "[::"},
        HERE | {"origin": "http://[::1"},
        HERE | {"origin": "http://evil.example"},
        HERE | {"origin": "null"},
        HERE | {"origin": "http://127.0.0.1:9000"},
    ],
)
def test_a_web_page_in_a_browser_here_may_not(headers: dict[str, str]) -> None:
    """Scripts reach loopback; under their own name they say where they come from."""
    assert refusal(keyless(), ENGINES, headers) == 403


def test_the_routers_own_page_may() -> None:
    """Its origin is the router itself."""
    own = HERE | {"origin": "http://127.0.0.1:8000"}
    assert keyless().admit(ENGINES, own).is_admin


@pytest.mark.parametrize(
    ("host", "expected"),
    [
        ("127.0.0.1", True),
        ("127.8.8.8", True),
        ("::1", True),
        ("localhost", True),
        ("0.0.0.0", False),
        ("10.0.0.1", False),
        ("localhost.evil.example", False),
        ("", False),
    ],
)
def test_what_counts_as_this_machine(host: str, expected: bool) -> None:
    """Only what nobody else can reach."""
    assert is_loopback(host) is expected


def test_key_files_take_keys_hashes_and_rotations(tmp_path: Path) -> None:
    """The file need not tell a key, and two may be good for a while."""
    file, other = tmp_path / "keys.toml", "another-key-of-the-same"
    hashed = hashlib.sha256(other.encode()).hexdigest()
    file.write_text(f'acme = ["{CLIENT}", "sha256:{hashed}"]\n"a b" = "{ADMIN}"\n')
    keys = KeyRing(read_api_keys(file))
    assert keys.name_of(CLIENT) == keys.name_of(other) == "acme"
    assert keys.name_of(ADMIN) == "a b"
    assert keys.name_of(hashed) is None
    assert keys.name_of("") is None


@pytest.mark.parametrize(
    "text",
    [
        "",
        "secret-secret-secret",
        'a = "secret"',
        "a = 1",
        "a = []",
        'a = "sha256:12"',
        f'a = "sha256:{"g" * 64}"',
        f'a = "{CLIENT}"\nb = "{CLIENT}"',
        f'"" = "{CLIENT}"',
        f'a = "{CLIENT}"\na = "{ADMIN}"',
    ],
)
def test_a_bad_key_file_is_one_sentence_without_a_key(
    tmp_path: Path, text: str
) -> None:
    """It names the file and the place; it tells no secret."""
    file = tmp_path / "keys.toml"
    file.write_text(text)
    with pytest.raises(KeyFileError) as refused:
        read_api_keys(file)
    said = str(refused.value)
    assert str(file) in said
    assert "\n" not in said
    assert "secret" not in said
    assert CLIENT not in said


def turn(**fields: str) -> TurnRequest:
    pairs = ",".join(f'"{name}":{value}' for name, value in fields.items())
    body = '{"model":"m","messages":[]' + (f",{pairs}" if pairs else "") + "}"
    return parse_turn(Api.CHAT, {}, body.encode(), FieldRules())


def salt(tenancy: Tenancy, tenant: str, **fields: str) -> bytes | None:
    raw = tenancy.salted(turn(**fields), tenant).body.get("cache_salt")
    return None if raw is None else bytes(raw)


def test_each_tenant_has_a_salt_of_its_own() -> None:
    """No prefix-cache hit, nor its timing, tells one tenant of another."""
    tenancy = Tenancy([b"secret"])
    salts = {salt(tenancy, tenant) for tenant in ("a", "b", "ab")}
    assert len(salts) == 3
    assert salt(tenancy, "a") == salt(Tenancy([b"new", b"secret"]), "a")
    assert salt(tenancy, "a") != salt(Tenancy([b"other"]), "a")


def test_a_clients_own_salt_parts_more_and_never_less() -> None:
    """Whatever a client sends, it does not get into another tenant's cache."""
    tenancy = Tenancy([b"secret"])
    plain = salt(tenancy, "a")
    assert plain is not None
    mine = salt(tenancy, "a", cache_salt='"mine"')
    assert mine not in (plain, salt(tenancy, "a", cache_salt='"other"'))
    assert salt(tenancy, "b", cache_salt=plain.decode()) != plain
    assert salt(tenancy, "a", cache_salt="null") == plain
    with pytest.raises(BadRequestError):
        tenancy.salted(turn(cache_salt="1"), "a")


def test_the_nameless_tenant_is_left_alone() -> None:
    """A router without client keys adds nothing, and takes nothing away."""
    tenancy = Tenancy([b"secret"])
    assert salt(tenancy, "") is None
    assert salt(tenancy, "", cache_salt='"mine"') == b'"mine"'


def test_vllm_takes_the_salt() -> None:
    """At most 128 characters, and none of those that it refuses."""
    text = salt(Tenancy([b"secret"]), "a")
    assert text is not None
    assert text.strip(b'"').isalnum()
    assert len(text) <= 128
