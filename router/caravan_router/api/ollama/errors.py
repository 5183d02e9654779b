"""Ollama's error envelope: ``{"error": MESSAGE}`` with OpenAI's statuses. TGI's ``error_type`` is added."""

from caravan_router.api.dialect import Dialect
from caravan_router.api.openai.errors import openai_status
from caravan_router.api.tgi.errors import TGI

OLLAMA = Dialect(name="Ollama", envelope=TGI.envelope, status=openai_status, body=TGI.body)
