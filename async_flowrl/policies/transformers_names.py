"""`read_names_once` makes transformers read the text of all its model files once instead of twice.

It looks for the names that each file exports: when transformers is imported, with the folder `models` as the argument,
and when transformers.models is, with that folder's `__init__.py`. That is a quarter of a second of CPU each time.
"""

from pathlib import Path
from typing import Any


def read_names_once() -> None:
    """Imports transformers and gives transformers.models what was read for it.

    Does nothing more with a version of transformers that reads the names in another way.
    """
    import transformers
    from transformers.utils import import_utils

    read: Any = getattr(import_utils, "create_import_structure_from_path", None)
    if not hasattr(read, "cache_info"):
        return
    folder = Path(transformers.__file__).parent / "models"

    def names(path: str | Path) -> Any:
        return read(folder if Path(path) == folder / "__init__.py" else path)

    import_utils.create_import_structure_from_path = names
