"""The answer of a command that is run with --json: one object on stdout, when it has ended."""

import contextlib
import json
import os
import sys
from collections.abc import Iterator


class Answer:
    """What a command found: `fields`, and line, figures and table of each result added."""

    def __init__(self, fields: dict):
        self.fields = fields
        self.results = []
        self.failed = False  # whether a result has failed
        self.is_main = True  # of several processes only the main one answers

    def add(self, result) -> None:
        self.failed = self.failed or result.failed
        table = [list(row) for row in result.grid]
        self.results.append({"line": result.line, "figures": result.figures, "table": table})

    @contextlib.contextmanager
    def on_stdout(self) -> Iterator[None]:
        """Send all that is printed to stderr, by other processes too; the object to stdout."""
        sys.stdout.flush()
        with os.fdopen(os.dup(1), "w", encoding="utf-8") as stdout:
            os.dup2(2, 1)
            try:
                yield
            except BaseException as error:
                self.fields |= {"error": f"{type(error).__name__}: {error}", "exit_code": 1}
                raise
            finally:
                if self.is_main:
                    stdout.write(self.text())
                sys.stdout.flush()
                stdout.flush()
                os.dup2(stdout.fileno(), 1)

    def text(self) -> str:
        """The object as a line of JSON, with all figures together."""
        from kit.base.run import replace_non_finite  # torch, for which --help does not wait

        figures = {}
        for result in self.results:
            figures |= result["figures"]
        plain = replace_non_finite(self.fields | {"figures": figures, "results": self.results})
        return json.dumps(plain, ensure_ascii=False, default=str) + "\n"
