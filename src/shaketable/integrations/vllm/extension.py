"""The worker extension that `options` names. vLLM imports this module in its workers, and an error here stops it."""

from shaketable.integrations.vllm import Extension, _install

_install()

__all__ = ["Extension"]
