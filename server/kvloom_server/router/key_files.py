"""The key files, read at start and followed: a key is given or taken without a
restart."""

from collections.abc import Callable
from pathlib import Path

from kvloom_server.keys import handle_keys, parse_api_keys, read_api_keys
from kvloom_server.settings import RouterSettings

from .access import KeyRing
from .seal import Sealer
from .tenancy import Tenancy
from .watched import WatchedFile


class KeyFiles:
    """Who may come in, and what seals handles. One a router."""

    def __init__(
        self, settings: RouterSettings, *, sealer: Sealer, tenancy: Tenancy
    ) -> None:
        """
        Raises:
            KeyFileError: a file is of no use.
        """
        self._interval_s = settings.file_interval_s
        self.watched: list[WatchedFile] = []
        self.clients = self._ring(settings.client_keys_file, "client_keys")
        self.admins = self._ring(settings.admin_keys_file, "admin_keys")
        path = settings.handle_key_file
        if path is not None:
            # The settings have read it, and it was good.

            def renew(text: bytes) -> None:
                secrets = handle_keys(text, source=str(path))
                sealer.renew(secrets)
                tenancy.renew(secrets)

            self._watch(path, "handle_keys", renew)

    def _ring(self, path: Path | None, name: str) -> KeyRing | None:
        if path is None:
            return None
        ring = KeyRing(read_api_keys(path))
        self._watch(
            path, name, lambda text: ring.renew(parse_api_keys(text, path=path))
        )
        return ring

    def _watch(self, path: Path, name: str, apply: Callable[[bytes], None]) -> None:
        self.watched.append(
            WatchedFile(path, name=name, interval_s=self._interval_s, apply=apply)
        )
