"""How the runtime's tests open objects and take tokens from them."""

# One thread and flash attention: llama.cpp's CPU backend then computes one row and many rows bit for bit alike.
EXACT = {"n_ctx": 512, "n_threads": 1, "n_threads_batch": 1, "flash_attn": True, "verbose": False}


def take(llama, tokens, n, **arguments):
    """The first `n` tokens that `llama` generates after `tokens`; the generator is closed then."""
    generator = llama.generate(tokens, **arguments)
    taken = [token for _, token in zip(range(n), generator, strict=False)]
    generator.close()
    return taken


def take_greedy(llama, tokens, n, **arguments):
    """`take` at temperature 0, unless told otherwise."""
    return take(llama, tokens, n, **{"temp": 0.0, **arguments})
