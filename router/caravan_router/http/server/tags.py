"""The groups into which routes are sorted for readers, by the dialect that they speak."""

from enum import StrEnum


class Tag(StrEnum):
    """In the order in which they are shown."""

    OPENAI = "OpenAI"
    RESPONSES = "OpenAI responses and conversations"
    FILES = "Files and batches"
    ANTHROPIC = "Anthropic"
    GEMINI = "Gemini"
    OLLAMA = "Ollama"
    TGI = "TGI"
    LLAMA_SERVER = "llama-server"
    CLOUD = "SageMaker and Vertex AI"
    STATE = "Health, metrics and documents"
    ADMIN = "Operators"


DESCRIPTIONS = {
    Tag.OPENAI: "Chats, completions, embeddings, ranks, decisions, transcriptions and models, with fields of vLLM's.",
    Tag.RESPONSES: "Responses that are stored and continued, and conversations that fork, rewind and are edited.",
    Tag.FILES: "Files of JSON lines, each a request, which are answered when there is room.",
    Tag.ANTHROPIC: "Messages, as Claude Code and Anthropic's libraries send them.",
    Tag.GEMINI: "Contents, as Gemini CLI and Google's libraries send them.",
    Tag.OLLAMA: "Chats, completions and models by name, as Ollama's clients use them.",
    Tag.TGI: "Text generation, as clients of Hugging Face's Text Generation Inference use it.",
    Tag.LLAMA_SERVER: "Completions, slots and models on demand, as llama-server's clients use them.",
    Tag.CLOUD: "What managed hosting sends to a container.",
    Tag.STATE: "For probes, for Prometheus, for browsers and for generators of clients.",
    Tag.ADMIN: "Shards and cached prefixes. They need an operator's key; without keys, a client on this host.",
}
