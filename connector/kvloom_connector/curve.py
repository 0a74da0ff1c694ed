"""CURVE on lease services' sockets, where a cluster key is configured."""

import zmq
from zmq.utils import z85

from kvloom.protocol import CurveSide, curve_secret


def secure_service(socket: "zmq.Socket[bytes]", cluster_key: bytes | None) -> None:
    """Before ``bind``: let in only who knows the key; ``None``: everybody."""
    if cluster_key is None:
        return
    socket.curve_secretkey = z85.encode(curve_secret(cluster_key, CurveSide.SERVICE))
    socket.curve_server = True


def secure_peer(socket: "zmq.Socket[bytes]", cluster_key: bytes | None) -> None:
    """Before ``connect``: speak to who knows the key; ``None``: in the clear."""
    if cluster_key is None:
        return
    service = z85.encode(curve_secret(cluster_key, CurveSide.SERVICE))
    mine = z85.encode(curve_secret(cluster_key, CurveSide.PEER))
    socket.curve_serverkey = zmq.curve_public(service)
    socket.curve_secretkey = mine
    socket.curve_publickey = zmq.curve_public(mine)
