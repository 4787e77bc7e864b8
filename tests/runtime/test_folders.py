"""The folders of a world are gone afterwards, whoever still writes into them."""

import threading
from pathlib import Path

from labkit.runtime.folders import remove


def test_a_folder_goes_although_a_dying_rank_writes_into_it(tmp_path: Path) -> None:
    for k in range(20):
        folder = tmp_path / f"world{k}"
        folder.mkdir()
        for number in range(100):
            (folder / f"before{number}").touch()

        def write(folder: Path = folder) -> None:
            for number in range(200):
                try:
                    (folder / f"late{number}").touch()
                except OSError:
                    return

        writer = threading.Thread(target=write)
        writer.start()
        remove([str(folder)])
        writer.join()
        assert not folder.exists()
