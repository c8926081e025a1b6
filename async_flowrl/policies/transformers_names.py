"""`read_names_once` makes the import of transformers read the source text of its model files once instead of twice.

To import names only when they are used, transformers lists the names that every file below its folder `models` exports.
It does so twice with the same result: with the folder as the argument when `transformers` is imported, and with that
folder's `__init__.py` when `transformers.models` is imported. Each time takes a quarter of a second of CPU.
"""

from pathlib import Path
from typing import Any


def read_names_once() -> None:
    """Imports transformers and has the later import of transformers.models use the list that this one has made.

    It must be called before anything imports transformers.models. A version of transformers whose function has another
    name or keeps no results is imported and left as it is.
    """
    import transformers
    from transformers.utils import import_utils

    list_names: Any = getattr(import_utils, "create_import_structure_from_path", None)
    if not hasattr(list_names, "cache_info"):  # not a functools.lru_cache: nothing would be saved
        return
    folder = Path(transformers.__file__).parent / "models"

    def list_names_of_folder(path: str | Path) -> Any:
        return list_names(folder if Path(path) == folder / "__init__.py" else path)

    import_utils.create_import_structure_from_path = list_names_of_folder
