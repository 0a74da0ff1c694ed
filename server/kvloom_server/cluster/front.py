"""The router in front of a local cluster's engines, made before they load.

``KVLOOM_…`` variables hold for it as for ``kvloom serve``, but for those that would
have it listen, speak or know engines otherwise than a local cluster does.
"""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from pydantic import ValidationError

from kvloom_server.keys import KeyFileError
from kvloom_server.router import RouterServer
from kvloom_server.router.tracing import TracingUnavailableError
from kvloom_server.said import settings_errors
from kvloom_server.settings import EngineSpec, RouterSettings

from .asked import UpSettings
from .engine_args import LOOPBACK, Connector, EngineSlot, Role
from .flags import api_key
from .launch import ClusterError

NOT_READ: Final[Mapping[str, Any]] = {
    # A local cluster's address is http://127.0.0.1, in its ready file and elsewhere.
    "host": LOOPBACK,
    "tls_cert": None,
    "tls_key": None,
    # Its engines are its own.
    "engines_file": None,
    "upstream_ca_file": None,
}
"""What no variable sets on a local cluster's router."""
_OPEN: Final[Mapping[str, Any]] = {"client_keys_file": None, "admin_keys_file": None}


def router_of(
    settings: UpSettings, slots: list[EngineSlot]
) -> tuple[RouterSettings, RouterServer]:
    """The router, not started; with the settings that it has.

    Raises:
        ClusterError: what the variables say is of no use.
    """
    try:
        wanted = router_settings(settings, slots)
        return wanted, RouterServer(wanted)
    except ValidationError as error:
        prefix = RouterSettings.model_config["env_prefix"]
        text = settings_errors(error.errors(), os.environ, prefix)
        raise ClusterError(text) from error
    except (KeyFileError, TracingUnavailableError) as error:
        raise ClusterError(str(error)) from error


def router_settings(settings: UpSettings, slots: list[EngineSlot]) -> RouterSettings:
    """The router's settings in front of these engines.

    Raises:
        ClusterError: no one API key would do for all of them.
        pydantic.ValidationError: a variable is out of range; it names the field.
    """
    given: dict[str, Any] = {**NOT_READ, **(_OPEN if settings.is_open else {})}
    key = engine_api_key(settings, os.environ)
    if key is not None:
        given["upstream_api_key"] = key
    if settings.direct_tokens is not None:
        given["direct_tokens"] = settings.direct_tokens
    return RouterSettings(
        **given,
        port=settings.port,
        connector=settings.connector.value,
        returns=settings.returns,
        transfer=settings.transfer,
        prefill=_specs(settings, slots, Role.PREFILL),
        decode=_specs(settings, slots, Role.DECODE),
        # Also where it is None: a variable that only the router reads would have
        # it speak CURVE to engines that do not.
        cluster_key_file=key_file(settings),
    )


def _specs(
    settings: UpSettings, slots: list[EngineSlot], role: Role
) -> tuple[EngineSpec, ...]:
    has_leases = settings.connector is Connector.KVLOOM
    return tuple(
        EngineSpec(url=slot.url, lease_address=lease if has_leases else None, rank=rank)
        for slot in slots
        if slot.role is role
        for rank, lease in slot.ranks_and_leases
    )


def engine_api_key(settings: UpSettings, environment: Mapping[str, str]) -> str | None:
    """The key that the engines' API will ask for, if any.

    Raises:
        ClusterError: prefill's is another than decode's.
    """
    prefill, decode = (api_key(settings.args_of(r), environment) for r in Role)
    if prefill != decode:
        raise ClusterError(
            "prefill and decode would ask for different API keys, and the router sends "
            "one to all engines: give the same with --engine-arg=--api-key=…"
        )
    return prefill


def key_file(settings: UpSettings) -> Path | None:
    """The cluster key's file for engines that have a lease service."""
    if settings.cluster_key_file is None or settings.connector is Connector.STOCK:
        return None
    return settings.cluster_key_file.absolute()
