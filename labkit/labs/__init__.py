"""The labs' checks, by number: `from labkit.labs.lab_05 import checks`.

A lab is one folder, such as notebooks/src/05_ddp. A module name cannot begin with a digit, so each
folder becomes a package here: `labkit.labs.lab_05`. In a wheel, this folder itself holds the
student notebooks and the lab folders.
"""

import sys
from importlib.machinery import ModuleSpec
from importlib.util import module_from_spec
from pathlib import Path

_HERE = Path(__file__).parent
_CHECKOUT = _HERE.parent.parent / "notebooks"
NOTEBOOKS = _CHECKOUT if (_CHECKOUT / "src").is_dir() else _HERE
FOLDERS = {  # "05" -> notebooks/src/05_ddp
    folder.name[:2]: folder
    for folder in sorted((NOTEBOOKS / "src").glob("[0-9][0-9]_*"))
    if (folder / "checks.py").is_file()
}

for _number, _folder in FOLDERS.items():
    _spec = ModuleSpec(f"{__name__}.lab_{_number}", None, is_package=True)
    _spec.submodule_search_locations = [str(_folder)]
    sys.modules[_spec.name] = globals()[f"lab_{_number}"] = module_from_spec(_spec)
