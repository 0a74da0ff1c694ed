"""What the command line says before anything starts: one sentence, at once."""

import asyncio
import http.server
import re
import socket
import ssl
import threading
from contextlib import contextmanager
from importlib.metadata import version

import pytest
from e2e.certificates import certificate
from starlette.responses import JSONResponse
from starlette.routing import Route
from typer.testing import CliRunner

from kvloom.testing import FakeCluster
from kvloom_server.cli import app
from kvloom_server.cluster.ports import free_ports
from kvloom_server.said import settings_errors

ENV = {"COLUMNS": "1000", "NO_COLOR": "1", "TERM": "dumb"}


def run(*arguments, **variables):
    return CliRunner().invoke(app, list(arguments), env={**ENV, **variables})


@pytest.mark.parametrize("command", ["up", "serve"])
@pytest.mark.parametrize(("port", "bound"), [("-1", "0"), ("65536", "65535")])
def test_a_port_out_of_range_is_refused(command, port, bound):
    """With the option and the bound."""
    done = run(command, f"--port={port}")
    assert done.exit_code == 2
    assert "--port" in done.output
    assert bound in done.output


@pytest.mark.parametrize(
    "arguments",
    [
        ("serve", "--prefill=host:1"),
        ("serve", "--decode=http://d:1,leese=tcp://d:2"),
        ("doctor", "--engine=d:8000"),
    ],
)
def test_an_engine_in_another_form_is_shown_the_right_one(arguments):
    """No traceback for a typing mistake."""
    done = run(*arguments)
    assert done.exit_code == 2
    assert "write http://host:port" in done.output


@pytest.mark.parametrize("command", ["up --port=0", "serve --port=0", "doctor"])
def test_a_cluster_key_that_is_not_there_is_one_sentence(command, tmp_path):
    """Wherever it is given; whatever else has the usual port."""
    path = tmp_path / "key"
    for done in (
        run(*command.split(), f"--cluster-key-file={path}"),
        run(*command.split(), KVLOOM_CLUSTER_KEY_FILE=str(path)),
    ):
        assert done.exit_code == 1
        assert done.output.startswith(f"error: the cluster key file {path} can't be")
        assert done.output.count("\n") == 1


def test_a_variable_that_can_be_none_is_one_sentence():
    """The setting's name, and what is wrong with it."""
    done = run("serve", KVLOOM_PORT="many")
    assert done.exit_code == 1
    assert done.output.startswith("error: KVLOOM_PORT=many: ")


@contextmanager
def fake_cluster():
    """Fake engines in a thread of their own, so that a command can run beside."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()

    def do(work):
        return asyncio.run_coroutine_threadsafe(work, loop).result()

    async def begin():
        return await FakeCluster().__aenter__()

    try:
        cluster = do(begin())
        try:
            yield cluster
        finally:
            do(cluster.aclose())
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()


def says_version(cluster, text):
    """Have fake engines answer as vLLM of a version."""

    async def version(_request):
        return JSONResponse({"version": text})

    for server in cluster.servers:
        server.engine.app.router.routes.insert(0, Route("/version", version))


def test_doctor_looks_at_running_engines():
    """What is well, what was not looked at, what is amiss; the exit code says
    whether anything is."""

    with fake_cluster() as cluster:
        prefill, decode = cluster.prefill[0], cluster.decode[0]
        engines = [f"--engine={prefill.url}"]
        engines += [f"--engine={decode.url},lease={decode.lease_address}"]
        says_version(cluster, "0.31.0")
        amiss = run("doctor", *engines)
        says_version(cluster, "0.32.0")
        well = run("doctor", *engines)
    assert amiss.exit_code == 1
    assert f"lack {prefill.url} is vLLM 0.32  0.31.0" in amiss.output
    assert well.exit_code == 0, well.output
    assert f"ok   {decode.url} has kvloom's connector" in well.output
    assert f"note {prefill.url} has kvloom's connector" in well.output
    assert "the same model on all 2 engines  fake-model" in well.output
    assert well.output.endswith("ready: nothing is amiss with these engines\n")
    assert amiss.output.endswith("not ready: mend what is marked `lack`\n")


@contextmanager
def https_engine(cert, key):
    """An engine behind a certificate, as far as it is asked for its model."""

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            self.send_response(200)
            self.end_headers()
            self.wfile.write(b'{"version": "0.32.0", "data": [{"id": "m"}]}')

        def log_message(self, *_):
            pass

    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(cert, key)
    with http.server.HTTPServer(("127.0.0.1", 0), Handler) as server:
        server.handle_error = lambda *_: None
        server.socket = context.wrap_socket(server.socket, server_side=True)
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"https://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()


def test_doctor_believes_whom_the_router_would(tmp_path):
    """The same certificates vouch for engines; else the two would differ on
    whether an engine can be reached."""
    cert, key = certificate(tmp_path)
    with https_engine(cert, key) as url:
        told = run("doctor", f"--engine={url}", KVLOOM_UPSTREAM_CA_FILE=str(cert))
        untold = run("doctor", f"--engine={url}")
    assert f"ok   {url} serves" in told.output
    assert f"ok   {url} names its model  m" in told.output
    assert f"lack {url} serves" in untold.output
    assert untold.exit_code == 1
    none = run("doctor", f"--engine={url}", KVLOOM_UPSTREAM_CA_FILE="/no/such")
    assert none.exit_code == 1
    assert none.output == "error: there is no file /no/such\n"


def test_doctor_alone_looks_at_this_machine():
    """As before."""
    done = run("doctor")
    assert "Python 3.11 or newer" in done.output
    assert "http" not in done.output


def test_doctor_ends_with_what_it_comes_to():
    """Who reads the last line only knows what to do next."""
    done = run("doctor")
    last = done.output.splitlines()[-1]
    assert last.startswith("ready: kvloom up" if done.exit_code == 0 else "not ready:")


@pytest.mark.parametrize(
    ("arguments", "variables", "said"),
    [
        ((), {"KVLOOM_HANDLE_KEY": "short"}, "openssl"),
        (("--handle-key-file={tmp}/none",), {}, "can't be read"),
        (("--client-keys-file={tmp}/bad",), {}, "is no TOML"),
        (("--admin-keys-file={tmp}/none",), {}, "can't be read"),
        (("--engines-file={tmp}/none",), {}, "can't be read"),
        (("--engines-file={tmp}/bad",), {}, "is no TOML"),
        (("--tls-cert={tmp}/bad",), {}, "tls_cert and tls_key"),
        (("--tls-cert={tmp}/bad", "--tls-key={tmp}/none"), {}, "there is no file"),
        (("--tls-cert={tmp}/bad", "--tls-key={tmp}/bad"), {}, "of no use"),
        (("--upstream-ca-file={tmp}/bad",), {}, "of no use"),
    ],
)
def test_a_file_of_no_use_is_one_sentence(tmp_path, arguments, variables, said):
    """Which file, and why; no traceback, and nothing of what is in it."""
    (tmp_path / "bad").write_text("secret = [")
    options = [argument.format(tmp=tmp_path) for argument in arguments]
    done = run("serve", "--port=0", *options, **variables)
    assert done.exit_code == 1
    assert said in done.output
    last = done.output.splitlines()[-1]
    assert last.startswith("error: ")
    assert "Traceback" not in done.output
    assert "secret" not in last


def test_a_port_that_is_taken_is_one_sentence():
    """Which, and what to do."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        done = run("serve", f"--port={port}", "--decode=http://127.0.0.1:1")
    assert done.exit_code == 1
    last = done.output.splitlines()[-1]
    assert f"error: 127.0.0.1, port {port}, can't be listened on" in last
    assert "Errno" not in done.output


def test_help_names_what_an_operator_sets():
    """Each option says what it is for."""
    done = run("serve", "--help")
    for option in ("engines-file", "client-keys-file", "admin-keys-file", "tls-cert"):
        assert f"--{option}" in done.output


def test_a_setting_of_no_use_is_shown_as_it_was_given():
    """The variable and its value, where that is no secret."""
    done = run("serve", "--decode=http://d:1", KVLOOM_RETURNS="maybe")
    assert done.exit_code == 1
    assert "KVLOOM_RETURNS=maybe" in done.output
    done = run("serve", "--decode=http://d:1", KVLOOM_MAX_WAIT_S="soon")
    assert "KVLOOM_MAX_WAIT_S=soon" in done.output


def test_what_is_wrong_with_a_key_does_not_show_it():
    """Errors end up in logs."""
    said = settings_errors(
        [{"loc": ("handle_key",), "msg": "too short"}],
        {"KVLOOM_HANDLE_KEY": "hush"},
        "KVLOOM_",
    )
    assert said == "KVLOOM_HANDLE_KEY: too short"


def test_nobody_there_is_said_in_plain_words():
    """Without the terms of the library that tried."""
    [port] = free_ports(1)
    done = run("status", f"--url=http://127.0.0.1:{port}")
    assert done.exit_code == 1
    assert f"127.0.0.1:{port}: Connection refused" in done.output
    assert "ssl:" not in done.output


@pytest.mark.parametrize("command", [("up",), ("serve",), ("bench", "reuse")])
def test_help_cuts_no_option_off_on_a_narrow_terminal(command):
    """Names are typed from what is read there."""
    done = run(*command, "--help", COLUMNS="80")
    assert not re.search(r"--[\w-]*…", done.output)


def test_it_says_which_version_it_is():
    """For reports of bugs."""
    done = run("--version")
    assert (done.exit_code, done.output) == (0, f"kvloom {version('kvloom')}\n")


def _commands(app, name=()):
    for command in app.registered_commands:
        yield (*name, command.name or command.callback.__name__.strip("_"))
    for group in app.registered_groups:
        yield from _commands(group.typer_instance, (*name, group.name))


@pytest.mark.parametrize("command", list(_commands(app)), ids=" ".join)
def test_help_shows_brackets_that_are_meant(command):
    """Rich would take ``kvloom[bench]`` for a style, and leave it out."""
    done = run(*command, "--help")
    assert done.exit_code == 0
    for line in done.output.splitlines():
        assert not re.search(r"needs kvloom\b(?!\[)|install 'kvloom'", line), line
