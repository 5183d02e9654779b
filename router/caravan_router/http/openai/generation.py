"""OpenAI's generating routes: chats, completions, audio and decisions, and routes about their prompts."""

from aiohttp import web

from caravan_dialects.api.generation.parts import MediaParts
from caravan_dialects.api.generation.prompt import RenderedTokens, rendered_tokens
from caravan_dialects.api.openai.audio import AskedSpoken, Spoken, SpokenEvent, TranscriptionForm, TranslationForm
from caravan_dialects.api.openai.chat.plan import chat_plan_of, chat_prompt_of
from caravan_dialects.api.openai.chat.reply import AskedChat
from caravan_dialects.api.openai.chat.schema import ChatCompletion, ChatCompletionChunk, ChatRequest, RenderedPrompt
from caravan_dialects.api.openai.completions.reply import AskedCompletions
from caravan_dialects.api.openai.completions.schema import Completion, CompletionRequest
from caravan_dialects.api.openai.completions.token_generation import AskedTokens, Generated, TokensRequest
from caravan_dialects.api.openai.completions.validation import completion_plan_of, validate_completion
from caravan_dialects.api.openai.constraints import constraint_of
from caravan_dialects.api.openai.decisions.reply import AskedDecision
from caravan_dialects.api.openai.decisions.schema import Decision, DecisionRequest
from caravan_dialects.api.openai.errors import OPENAI
from caravan_dialects.api.openai.responses.schema import InputTokenCount
from caravan_dialects.chat.prompt import ChatPrompt
from caravan_router.http.generation.answer import answer
from caravan_router.http.generation.models import (
    asked_model,
    context_of,
    counting_refusals,
    reading_texts,
    served_model,
)
from caravan_router.http.server.form import read_form
from caravan_router.http.server.middleware import REQUEST_ID
from caravan_router.http.server.route import BODY_ERRORS, GENERATION_ERRORS, json_reply
from caravan_router.http.server.routes import Routes
from caravan_router.http.server.state import STATE
from caravan_router.http.server.tags import Tag

ROUTES = Routes(OPENAI, tag=Tag.OPENAI)


@ROUTES.route(
    "POST",
    "/v1/chat/completions",
    "Answer a conversation with text or tool calls",
    around=counting_refusals,
    reply=ChatCompletion,
    events=ChatCompletionChunk,
    errors=GENERATION_ERRORS,
)
async def chat_completions(request: web.Request, body: ChatRequest) -> web.StreamResponse:
    return await answer(request, AskedChat(body, request.app[STATE].limits))


ROUTES.also("/chat/completions", "unversioned")


@ROUTES.route(
    "POST",
    "/v1/chat/completions/input_tokens",
    "Count the prompt tokens of a chat",
    around=reading_texts,
    reply=InputTokenCount,
    errors=(*BODY_ERRORS, 404, 429, 503),
)
async def chat_input_tokens(request: web.Request, body: ChatRequest) -> web.Response:
    return json_reply(InputTokenCount(len((await rendered_chat(request, body)).tokens.token_ids)))


ROUTES.also("/chat/completions/input_tokens", "unversioned")


@ROUTES.route(
    "POST",
    "/v1/chat/completions/render",
    "Return the prompt tokens of a chat, as in vLLM",
    around=reading_texts,
    reply=RenderedTokens,
    errors=(*BODY_ERRORS, 404, 429, 503),
)
async def render_chat(request: web.Request, body: ChatRequest) -> web.Response:
    prompt = await rendered_chat(request, body)
    name = served_model(request.app[STATE], asked_model(request, body.model)).engine.model.name
    return json_reply(rendered_tokens(name, prompt.tokens.token_ids))


@ROUTES.route(
    "POST",
    "/apply-template",
    "Render a conversation with the model's chat template and return the text",
    around=reading_texts,
    reply=RenderedPrompt,
    errors=(*BODY_ERRORS, 404, 429, 503),
)
async def apply_template(request: web.Request, body: ChatRequest) -> web.Response:
    return json_reply(RenderedPrompt((await rendered_chat(request, body)).text))


async def rendered_chat(request: web.Request, body: ChatRequest) -> ChatPrompt:
    """Return the prompt of a chat that is not answered. Raises RequestError, EngineError."""
    context = await context_of(request, asked_model(request, body.model))
    constrained = constraint_of(body, context.limits) is not None
    media = MediaParts(context.model.media)
    return await chat_prompt_of(context, chat_plan_of(context, body, constrained=constrained, media=media))


@ROUTES.route(
    "POST",
    "/v1/completions",
    "Complete one or several prompts",
    around=counting_refusals,
    reply=Completion,
    events=Completion,
    errors=GENERATION_ERRORS,
)
async def completions(request: web.Request, body: CompletionRequest) -> web.StreamResponse:
    return await answer(request, AskedCompletions(body, request.app[STATE].limits))


@ROUTES.route(
    "POST",
    "/v1/completions/render",
    "Return the tokens of each prompt, as in vLLM",
    around=reading_texts,
    reply=list[RenderedTokens],
    errors=(*BODY_ERRORS, 404, 429, 503),
)
async def render_completion(request: web.Request, body: CompletionRequest) -> web.Response:
    context = await context_of(request, asked_model(request, body.model))
    valid = await validate_completion(context, body, completion_plan_of(body, context.limits))
    return json_reply([rendered_tokens(context.model.name, one.prompt) for one in valid])


@ROUTES.route(
    "POST",
    "/inference/v1/generate",
    "Continue a prompt of token ids, and return token ids, as in vLLM",
    around=counting_refusals,
    reply=Generated,
    events=Generated,
    errors=GENERATION_ERRORS,
)
async def generate_tokens(request: web.Request, body: TokensRequest) -> web.StreamResponse:
    return await answer(request, AskedTokens(body, request.app[STATE].limits, request[REQUEST_ID]))


@ROUTES.route(
    "POST",
    "/v1/audio/transcriptions",
    "Transcribe audio, with a model that reads audio",
    around=counting_refusals,
    form=TranscriptionForm,
    reply=Spoken,
    events=SpokenEvent,
    errors=GENERATION_ERRORS,
)
async def transcriptions(request: web.Request) -> web.StreamResponse:
    return await answer(request, AskedSpoken(await read_form(request, TranscriptionForm)))


@ROUTES.route(
    "POST",
    "/v1/audio/translations",
    "Translate audio into English, with a model that reads audio",
    around=counting_refusals,
    form=TranslationForm,
    reply=Spoken,
    errors=GENERATION_ERRORS,
)
async def translations(request: web.Request) -> web.StreamResponse:
    return await answer(request, AskedSpoken(await read_form(request, TranslationForm)))


@ROUTES.route(
    "POST",
    "/v1/decisions",
    "Answer typed questions about an input with probabilities",
    around=counting_refusals,
    reply=Decision,
    errors=GENERATION_ERRORS,
)
async def decisions(request: web.Request, body: DecisionRequest) -> web.StreamResponse:
    return await answer(request, AskedDecision(body))
