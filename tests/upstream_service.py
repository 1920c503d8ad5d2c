"""A function of upstream's code as a service: each line of stdin is a JSON list of arguments, each answer one line."""

import json
import os
import sys


def serve(function):
    """Answer by the first stdout, an empty line or the error; whatever upstream prints goes to stderr."""
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    for line in sys.stdin:
        try:
            function(*json.loads(line))
            answers.write("\n")
        except Exception as error:
            answers.write(f"{type(error).__name__}: {error}".replace("\n", " ") + "\n")
