"""The models that an engine says it serves."""

import msgspec


class _ModelList(msgspec.Struct):
    data: list[msgspec.Raw] = []


class _Model(msgspec.Struct):
    id: str


def listed_models(answer: bytes) -> dict[str, msgspec.Raw]:
    """An engine's ``/v1/models``: its entries as they came, by model.

    Raises:
        msgspec.DecodeError: it is something else.
        RecursionError: it is nested too deep.
    """
    listed = msgspec.json.decode(answer, type=_ModelList).data
    return {msgspec.json.decode(raw, type=_Model).id: raw for raw in listed}
