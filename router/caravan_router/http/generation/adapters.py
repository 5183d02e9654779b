"""Which adapter a request asks for, by the names that the shards gave."""

from caravan_router.core.engine import ModelFacts
from caravan_router.http.generation.rules import UnknownAdapterError


def adapter_of_id(adapter_id: str | None, model: ModelFacts) -> str:
    """TGI's ``adapter_id``; "" for none. Raises UnknownAdapterError, where TGI would answer without the adapter."""
    if adapter_id is None:
        return ""
    if adapter_id not in model.adapters:
        raise UnknownAdapterError("adapter_id", model.adapters, adapter_id)
    return adapter_id


def adapter_of_model(name: str | None, model: ModelFacts) -> str:
    """OpenAI's ``model``; "" for any name that is no adapter's: clients send what they like."""
    return name if name is not None and name in model.adapters else ""
