"""An engine for Ray Serve LLM that computes with Caravan: serve run deploy.platforms.ray_serve:app

Ray Serve asks an engine in OpenAI's terms. So each replica opens Caravan's own server over its `AsyncLLM`, on a port of
this host, and passes requests and replies on as they are. Needs `ray[serve,llm]` and `llama-caravan`.
"""

from collections.abc import AsyncGenerator
from typing import Any

from aiohttp import ClientSession, ClientTimeout

from caravan import AsyncLLM

_HTTP_OK = 200
# Replies take as long as they take.
_NO_LIMIT = ClientTimeout(total=None)


class CaravanEngine:
    """An engine as `ray.serve.llm.LLMServer` takes it in ``engine_cls``."""

    def __init__(self, llm_config: Any) -> None:
        """``llm_config``: a `ray.serve.llm.LLMConfig`, whose ``engine_kwargs`` are options of `AsyncLLM`."""
        loading = llm_config.model_loading_config
        self._llm = AsyncLLM(loading.model_source or loading.model_id, **llm_config.engine_kwargs)
        self._server = self._llm.serve(port=0)
        self._session: ClientSession | None = None

    async def start(self) -> None:
        """Load the model."""
        await self._llm.__aenter__()
        await self._server.__aenter__()
        self._session = ClientSession(self._server.url, timeout=_NO_LIMIT)

    async def stop(self) -> None:
        """End what runs and free the model."""
        if self._session is not None:
            await self._session.close()
            await self._server.stop()
        await self._llm.close()

    async def check_health(self) -> None:
        """Raise RuntimeError if the replica has to be replaced."""
        if self._session is None:
            raise RuntimeError("the engine is not started")
        async with self._session.get("/health") as reply:
            if reply.status != _HTTP_OK:
                raise RuntimeError(f"Caravan's /health answers {reply.status}")

    async def chat(self, request: Any, raw_request_info: Any = None) -> AsyncGenerator[Any, None]:
        """Yield the response, an error, or with ``stream`` the events of a chat completion."""
        async for part in self._ask("/v1/chat/completions", request, "ChatCompletionResponse"):
            yield part

    async def completions(self, request: Any, raw_request_info: Any = None) -> AsyncGenerator[Any, None]:
        """Yield the response, an error, or with ``stream`` the events of a completion."""
        async for part in self._ask("/v1/completions", request, "CompletionResponse"):
            yield part

    async def embeddings(self, request: Any, raw_request_info: Any = None) -> AsyncGenerator[Any, None]:
        """Yield the embeddings, or an error."""
        async for part in self._ask("/v1/embeddings", request, "EmbeddingResponse"):
            yield part

    async def _ask(self, path: str, request: Any, kind: str) -> AsyncGenerator[Any, None]:
        from ray.serve.llm import openai_api_models as types

        if self._session is None:
            raise RuntimeError("the engine is not started")
        body = request.model_dump(mode="json", exclude_unset=True)
        # Ray has chosen the replica by the name, which is Ray's.
        body.pop("model", None)
        async with self._session.post(path, json=body) as reply:
            if reply.status != _HTTP_OK:
                yield types.ErrorResponse(**await reply.json())
            elif body.get("stream"):
                event = b""
                async for line in reply.content:
                    event += line
                    if line == b"\n":
                        yield event.decode()
                        event = b""
            else:
                yield getattr(types, kind)(**await reply.json())


def app(arguments: dict[str, str]) -> Any:
    """Return the application: one model, named by ``model`` (a GGUF file or hf:OWNER/REPOSITORY:Q4_K_M)."""
    from ray import serve
    from ray.serve.llm import LLMConfig, LLMServer
    from ray.serve.llm.ingress import OpenAiIngress, make_fastapi_ingress

    config = LLMConfig(
        model_loading_config={"model_id": arguments.get("name", "caravan"), "model_source": arguments["model"]},
        deployment_config={"autoscaling_config": {"min_replicas": 1, "max_replicas": 4}},
        engine_kwargs={"ctx_size": 32768, "parallel": 8},
    )
    server = serve.deployment(LLMServer).options(**config.deployment_config)
    replicas = server.bind(config, engine_cls=CaravanEngine)
    return serve.deployment(make_fastapi_ingress(OpenAiIngress)).bind(llm_deployments=[replicas])
