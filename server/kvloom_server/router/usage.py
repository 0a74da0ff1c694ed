"""How many tokens a prompt had and how many were cached, as each API says it."""

import msgspec


class _Details(msgspec.Struct):
    cached_tokens: int | None = None


class Usage(msgspec.Struct):
    """The usage in a whole answer, of any API."""

    prompt_tokens: int | None = None
    prompt_tokens_details: _Details | None = None
    input_tokens: int | None = None
    input_tokens_details: _Details | None = None
    """The Responses API's; Anthropic's has none."""
    cache_read_input_tokens: int | None = None
    cache_creation_input_tokens: int | None = None

    @property
    def num_prompt(self) -> int | None:
        """Tokens of the prompt."""
        if self.prompt_tokens is not None or self.input_tokens is None:
            return self.prompt_tokens
        if self.input_tokens_details is not None:
            return self.input_tokens
        # Anthropic counts what was cached beside the rest.
        cached = (self.cache_read_input_tokens, self.cache_creation_input_tokens)
        return self.input_tokens + sum(count or 0 for count in cached)

    @property
    def num_cached(self) -> int | None:
        """Tokens of the prompt that were not computed, where it is said."""
        details = self.prompt_tokens_details or self.input_tokens_details
        if details is not None:
            return details.cached_tokens
        return self.cache_read_input_tokens
