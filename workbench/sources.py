"""Where workloads come from: tables, folders of images, random-mm settings, presets, ledgers."""

import json
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from workbench import ledger
from workbench.errors import WorkbenchError
from workbench.models import ModelFacts
from workbench.presets import PRESETS
from workbench.random_mm import RandomMM, parse_buckets, sample
from workbench.workload import Ints, Workload, make_workload

if TYPE_CHECKING:
    import pandas as pd

TABLE_LIMIT = 2**30  # bytes of a table file
IMAGE_LIMIT = 1_000_000  # files of a folder
COLUMNS = ("width", "height", "frames", "call")
_SHOWN_BUCKETS = 8
_READERS = {".csv": "csv", ".json": "json", ".jsonl": "jsonl", ".ndjson": "jsonl", ".parquet": "parquet"}
_IMAGES = frozenset((
    ".avif", ".bmp", ".gif", ".heic", ".heif", ".ico", ".jfif", ".jp2", ".jpe", ".jpeg", ".jpg", ".pbm", ".pgm",
    ".png", ".ppm", ".tga", ".tif", ".tiff", ".webp",
))  # fmt: skip


@dataclass(frozen=True)
class Options:
    """How a workload is read.

    Attributes:
        random_mm: the setting that a bucket string completes; its own buckets are not used.
        clamp, skip_bad: as in `make_workload`; `skip_bad` also leaves out unreadable images.
    """

    random_mm: RandomMM | None = None
    clamp: bool = False
    skip_bad: bool = False


def load_workload(spec: str | Path, facts: ModelFacts, options: Options | None = None) -> Workload:
    """Read a workload for a model.

    Args:
        spec: a preset's name; a bucket string of vLLM's random-mm such as `{(224, 224, 1): 1.0}`; a file
            (CSV, JSON, JSON Lines, Parquet with columns width, height and optionally frames, call; or a
            ledger); or a folder of images.
        facts: the model whose processor resizes the items.
        options: see `Options`.

    Raises:
        WorkbenchError: nothing of that name, unreadable, empty, or with a bad value.
    """
    options = options or Options()
    text = str(spec)
    if isinstance(spec, str) and text in PRESETS:
        preset = PRESETS[text]
        return random_mm(preset.recipe, facts, options, name=text, origin=preset.origin)
    if isinstance(spec, str) and text.lstrip().startswith("{"):
        return random_mm(replace(options.random_mm or RandomMM({}), buckets=parse_buckets(text)), facts, options)
    path = Path(spec)
    try:
        is_folder, is_file = bool(text) and path.is_dir(), path.is_file()
    except OSError:  # such as a name that is too long
        is_folder = is_file = False
    if is_folder:
        return image_folder(path, facts, options)
    if not is_file:
        raise WorkbenchError(
            f"there is no workload {text[:200]!r}: give a file, a folder of images, a bucket string like "
            f"{{(224, 224, 1): 1.0}}, or a preset ({', '.join(PRESETS)})"
        )
    if ledger.is_ledger(path):
        return ledger.to_workload(ledger.read_ledger(path), facts)
    return table_file(path, facts, options)


def random_mm(
    setting: RandomMM, facts: ModelFacts, options: Options, *, name: str = "random-mm", origin: str = ""
) -> Workload:
    """Make the workload of a random-mm setting."""
    sizes, offsets = sample(setting)
    shown = ", ".join(
        f"{width} x {height}" + (f" x {frames} frames" if frames > 1 else "") + f": {share:g}"
        for (height, width, frames), share in list(setting.buckets.items())[:_SHOWN_BUCKETS]
    )
    if len(setting.buckets) > _SHOWN_BUCKETS:
        shown += f" and {len(setting.buckets) - _SHOWN_BUCKETS} more"
    source = f"random-mm {{{shown}}}, {setting.requests} requests, seed {setting.seed}"
    return make_workload(
        sizes,
        offsets,
        facts,
        name=name,
        source=f"{source} ({origin})" if origin else source,
        clamp=options.clamp,
        skip_bad=options.skip_bad,
    )


# --- tables -------------------------------------------------------------------------------------------------


def table_file(path: Path, facts: ModelFacts, options: Options) -> Workload:
    """Read a CSV, JSON (an array of objects), JSON Lines or Parquet file with one item a row.

    Columns: `width`, `height` in pixels; `frames` (1 where the column is missing); `call`, any label: rows of
    one label are one request, in order of its first appearance. Without `call` every row is a request. Others
    are ignored. JSON may also be an array of arrays: requests of items.
    """
    kind = _READERS.get(path.suffix.lower())
    if kind is None:
        raise WorkbenchError(
            f"{path} is not a kind of table this reads ({', '.join(_READERS)}); name the file by what it holds"
        )
    table = _read_table(path, kind)
    missing = [name for name in ("width", "height") if name not in table.columns]
    if missing:
        raise WorkbenchError(
            f"{path} has no column {' and no column '.join(missing)}; it has "
            f"{', '.join(map(str, list(table.columns)[:20])) or 'none'}, and needs width, height[, frames][, call]"
        )
    if not len(table):
        raise WorkbenchError(f"{path} has no rows; give at least one image")
    sizes = np.ones((len(table), 3))
    for index, name in enumerate(COLUMNS[:3]):
        if name in table.columns:
            sizes[:, index] = _numbers(table, name, path)
    rows: Ints = np.arange(len(table), dtype=np.int64)
    offsets: Ints = np.arange(len(table) + 1, dtype=np.int64)
    if "call" in table.columns:
        rows, offsets = _by_label(table, path)
    return make_workload(
        sizes[rows],
        offsets,
        facts,
        name=path.stem,
        source=f"table {path.name}, {len(table):,} items",
        where=lambda item: f"{path.name} row {int(rows[item]) + 1}",
        clamp=options.clamp,
        skip_bad=options.skip_bad,
    )


def _read_table(path: Path, kind: str) -> "pd.DataFrame":
    import pandas as pd

    readers: dict[str, Callable[[Path], Any]] = {
        "csv": lambda file: pd.read_csv(file, skipinitialspace=True),
        "json": lambda file: pd.DataFrame.from_records(_records(json.loads(file.read_text("utf-8")), file)),
        "jsonl": lambda file: pd.read_json(file, lines=True),
        "parquet": pd.read_parquet,
    }
    try:
        if path.stat().st_size > TABLE_LIMIT:
            raise WorkbenchError(f"{path} is larger than {TABLE_LIMIT:,} bytes; sample it first")
        table: pd.DataFrame = readers[kind](path)
    except WorkbenchError:
        raise
    except ImportError as error:
        raise WorkbenchError(f"{path} needs pyarrow to be read; install the extra `lab`, or write a CSV") from error
    except pd.errors.EmptyDataError:
        raise WorkbenchError(f"{path} is empty; give at least one image") from None
    except UnicodeDecodeError as error:
        raise WorkbenchError(f"{path} is not UTF-8; save it as UTF-8") from error
    except (OSError, ValueError, TypeError, RecursionError, OverflowError) as error:
        raise WorkbenchError(f"{path} is not readable as {kind}: {str(error)[:200]}") from error
    table.columns = [str(name).strip().lower() for name in table.columns]
    if table.columns.duplicated().any():
        raise WorkbenchError(f"{path} has two columns {table.columns[table.columns.duplicated()][0]!r}; keep one")
    return table


def _records(value: Any, path: Path) -> list[dict[str, Any]]:
    """Return an array of objects, or requests of items, as rows."""
    if not isinstance(value, list):
        raise WorkbenchError(f"{path} is not a JSON array of objects with width and height, or of arrays of them")
    if any(isinstance(entry, list) for entry in value):
        nested = [
            (call, item) for call, items in enumerate(value) for item in (items if isinstance(items, list) else [items])
        ]
        value = [item | {"call": call} if isinstance(item, dict) else item for call, item in nested]
    records: list[dict[str, Any]] = []
    for number, record in enumerate(value, start=1):
        if not isinstance(record, dict):
            raise WorkbenchError(f"{path} item {number} is {str(record)[:40]!r}, not an object with width and height")
        records.append(record)
    return records


def _numbers(table: "pd.DataFrame", name: str, path: Path) -> Any:
    """Return a column as doubles; text is an error that names its first row, empty cells become NaN."""
    import pandas as pd

    column = table[name]
    if pd.api.types.is_bool_dtype(column):
        raise WorkbenchError(f"{path.name} column {name} holds true and false, not numbers; correct the data")
    numbers = pd.to_numeric(column, errors="coerce")
    text = numbers.isna() & column.notna()
    if text.any():
        row = int(text.to_numpy().argmax())
        raise WorkbenchError(
            f"{path.name} row {row + 1} has {name} {str(column.iloc[row])[:40]!r}, which is not a number; "
            "correct the data"
        )
    return numbers.to_numpy(np.float64)


def _by_label(table: "pd.DataFrame", path: Path) -> tuple[Ints, Ints]:
    """Return the rows ordered by the first appearance of their label, and where each label starts."""
    import pandas as pd

    if table["call"].isna().any():
        row = int(table["call"].isna().to_numpy().argmax())
        raise WorkbenchError(f"{path.name} row {row + 1} has no call; label every row, or leave the column out")
    try:
        codes, labels = pd.factorize(table["call"])
    except TypeError:
        raise WorkbenchError(f"{path.name} has calls that are lists or objects; use numbers or text") from None
    rows = np.argsort(codes, kind="stable").astype(np.int64)
    counts = np.bincount(codes, minlength=len(labels))
    return rows, np.concatenate([[0], np.cumsum(counts)]).astype(np.int64)


# --- images -------------------------------------------------------------------------------------------------


def image_folder(folder: Path, facts: ModelFacts, options: Options) -> Workload:
    """Read the sizes of a folder's images, recursively in order of their paths; one image is one request.

    Headers only. The orientation that EXIF tells is applied, as vLLM applies it; of an animation the first
    frame counts. Files whose names do not end like an image are ignored.
    """
    files = _image_files(folder)
    if find_spec("PIL") is None:
        raise WorkbenchError("reading images needs Pillow; install the extra `lab`, `cpu` or `gpu`")
    sizes: list[tuple[int, int, int]] = []
    read: list[Path] = []
    unreadable: list[str] = []
    for path in files:
        try:
            sizes.append((*_image_size(path), 1))
            read.append(path)
        except Exception as error:  # noqa: BLE001  Pillow's plugins raise what they like on damaged files
            unreadable.append(f"{path.relative_to(folder)} ({str(error)[:100]})")
    notes: tuple[str, ...] = ()
    if unreadable:
        what = f"{len(unreadable):,} of {len(files):,} images in {folder} cannot be read, the first: {unreadable[0]}"
        if not options.skip_bad:
            raise WorkbenchError(f"{what}; repair them, or pass --skip-bad")
        notes = (what,)
        if not sizes:
            raise WorkbenchError(f"{what}; none is left")
    return make_workload(
        np.array(sizes, np.int64),
        np.arange(len(sizes) + 1, dtype=np.int64),
        facts,
        name=folder.resolve().name,
        source=f"folder {folder.resolve().name}, {len(sizes):,} images",
        where=lambda item: str(read[item].relative_to(folder)),
        notes=notes,
        clamp=options.clamp,
        skip_bad=options.skip_bad,
    )


def _image_files(folder: Path) -> list[Path]:
    def found() -> Iterator[Path]:
        for path in folder.rglob("*"):
            if path.suffix.lower() in _IMAGES and path.is_file():
                yield path

    files: list[Path] = []
    for path in found():
        files.append(path)
        if len(files) > IMAGE_LIMIT:
            raise WorkbenchError(f"{folder} holds more than {IMAGE_LIMIT:,} images; give a smaller folder")
    if not files:
        raise WorkbenchError(f"{folder} holds no images ({', '.join(sorted(_IMAGES))}); give another folder")
    return sorted(files)


def _image_size(path: Path) -> tuple[int, int]:
    """Return (width, height) as vLLM sees the image, reading its header only."""
    from PIL import Image

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Pillow warns of large images; nothing is decoded here
        with Image.open(path) as image:
            width, height = image.size
            turned = image.getexif().get(0x0112, 1) in (5, 6, 7, 8)  # Orientation: by a quarter
    return (height, width) if turned else (width, height)
