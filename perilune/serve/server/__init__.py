"""The HTTP server: OpenAI's and Anthropic's endpoints in front of an `LLM`."""

from perilune.serve.server.app import build_app
from perilune.serve.server.config import ServerConfig

__all__ = ["ServerConfig", "build_app"]
