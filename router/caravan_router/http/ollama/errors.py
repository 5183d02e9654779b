"""Ollama's error envelope: ``{"error": MESSAGE}`` with OpenAI's statuses. TGI's ``error_type`` is added."""

from caravan_router.http.openai.errors import openai_status
from caravan_router.http.server.dialect import Dialect
from caravan_router.http.tgi.errors import TGI

OLLAMA = Dialect(name="Ollama", envelope=TGI.envelope, status=openai_status, body=TGI.body)
