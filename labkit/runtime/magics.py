"""`%%ranks`: run a cell on every rank of a persistent world.

- `%load_ext labkit` loads the magics;
- `%%ranks 4`: the cell runs on 4 ranks, which keep their variables between cells;
- `%%ranks 0,2`: on ranks 0 and 2 of that world only ("2," for rank 2 alone);
- `%%ranks`: on all ranks of the current world;
- `%%ranks 4 -o losses`: store each rank's last value in the notebook's list `losses`;
- `%ranks`: show the world; `%ranks reset` starts new ranks, `%ranks close` ends the world.
"""

import itertools
from html import escape
from typing import Any

from IPython.core.error import UsageError
from IPython.core.magic import Magics, cell_magic, line_magic, magics_class

from labkit.events import ranks_in_words
from labkit.runtime.pick import check_size
from labkit.runtime.world import World

DEFAULT_SIZE = 4


class PerRank(list[Any]):
    """One value per rank (or its display form), shown one rank per line."""

    def __init__(self, ranks: list[int], values: list[Any]):
        super().__init__(values)
        self.ranks = ranks

    def __repr__(self) -> str:
        lines = []
        for rank, value in zip(self.ranks, self, strict=True):
            text = repr(value).replace("\n", "\n        ")
            lines.append(f"rank {rank}: {text}")
        return "\n".join(lines)

    def _repr_html_(self) -> str | None:
        pages = [getattr(value, "html", None) for value in self]
        if not any(pages):
            return None
        rows = zip(self.ranks, self, pages, strict=True)
        return "".join(
            f"<div>rank {rank}: {page or f'<pre>{escape(repr(value))}</pre>'}</div>"
            for rank, value, page in rows
        )


@magics_class
class RankMagics(Magics):  # type: ignore[misc, unused-ignore]
    """labkit's magics. Names predefined in cells: rank, size, comm, device, torch, dist."""

    world: World | None = None
    _cells = itertools.count(1)

    @cell_magic
    def ranks(self, line: str, cell: str) -> PerRank | None:
        """Run the cell on ranks: `%%ranks 4`, `%%ranks 0,2` or `%%ranks`. Shows each rank's last
        value or, with `-o NAME`, stores the values in the list NAME."""
        line, wanted, name = line.partition("-o")
        name = name.strip()
        if wanted and not name.isidentifier():
            raise UsageError("%%ranks ... -o NAME: pass a name, as in %%ranks 4 -o losses")
        world, chosen = self._choose(line.strip())
        filename = f"<%%ranks cell {next(self._cells)}>"
        values = PerRank(chosen, world.run_cell(cell, filename, chosen, as_text=not wanted))
        if wanted:
            assert self.shell is not None
            self.shell.user_ns[name] = values
        return None if wanted or all(value is None for value in values) else values

    @line_magic("ranks")  # type: ignore[arg-type, unused-ignore]
    def manage(self, line: str) -> None:
        """`%ranks`: show the world; `%ranks reset`: new ranks; `%ranks close`: end the world."""
        command = line.strip()
        if command not in ("", "reset", "close"):
            raise UsageError(f"%ranks {command}: use %ranks, %ranks reset or %ranks close")
        if self.world is None:
            print("no world yet: %%ranks 4 makes one")
        elif command == "":
            print(self.world)
        elif command == "reset":
            self.world.restart()
            print(f"{self.world}: new ranks, with no variables")
        else:
            self.world.close()
            self.world = None
            print("closed")

    def _choose(self, line: str) -> tuple[World, list[int]]:
        """The world that `line` requests, or the current world, and the ranks to run on."""
        try:
            numbers = [int(part) for part in line.rstrip(",").split(",")] if line else []
        except ValueError:
            raise UsageError(
                f"%%ranks {line}: pass a number of ranks (%%ranks 4) or a list (%%ranks 0,2)"
            ) from None
        is_list = "," in line
        size = numbers[0] if numbers and not is_list else None
        if self.world is not None and size is not None and size != self.world.size:
            check_size(size)  # before the working world is closed
            print(f"{ranks_in_words(size)} replace {self.world.size}, whose variables are gone")
            self.world.close()
            self.world = None
        if self.world is None:
            self.world = World(DEFAULT_SIZE if size is None else size)
        ranks = range(self.world.size)
        for number in numbers if is_list else ():
            if number not in ranks:
                raise UsageError(
                    f"%%ranks {line}: there is no rank {number}; choose 0 to {ranks[-1]}"
                )
        return self.world, numbers if is_list else list(ranks)
