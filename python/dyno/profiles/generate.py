"""Generator of the files that are made from the models and settings: `python -m dyno.profiles.generate`.

It writes `profiles/profile.schema.json` (for editors), and `profile-reference.md`, `known-profiles.md` and
`from-llama-cpp.md` in `docs/user` (for people). With `--check` it writes nothing. If a file is stale, it then
prints a diff, and the exit code is 1.
"""

from __future__ import annotations

import argparse
import difflib
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dyno._cli.flag_page import flags_page
from dyno.profiles._known import known_page
from dyno.profiles._reference import reference_page
from dyno.profiles.io import write_atomically
from dyno.profiles.schema import Profile
from dyno.settings import SETTINGS

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dyno.settings import Setting


def json_schema() -> dict[str, Any]:
    """The JSON schema of a profile, with all settings, their types and their ranges."""
    schema = _tidy(Profile.model_json_schema(by_alias=True))
    schema = {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "dyno profile",
        **schema,
    }
    settings = schema["properties"]["settings"]
    del settings["additionalProperties"]
    settings["properties"] = {setting.name: _setting_schema(setting) for setting in SETTINGS.values()}
    settings["additionalProperties"] = False
    return schema


def _setting_schema(setting: Setting) -> dict[str, Any]:
    value: dict[str, Any]
    if setting.type == "bool":
        value = {"type": "boolean"}
    elif setting.type == "int":
        value = {"type": "integer", "minimum": setting.minimum, "maximum": setting.maximum}
    elif setting.type == "float":
        value = {"type": "number", "minimum": setting.minimum, "maximum": setting.maximum}
    elif setting.type == "choice":
        value = {"enum": [*setting.choices, *setting.foreign_choices]}
    else:
        value = {"type": "array", "items": {"type": "string"}}
    entry = {"allOf": [{"$ref": "#/$defs/SettingEntry"}, {"properties": {"value": value}}]}
    return {"description": setting.doc, "oneOf": [{"const": "default"}, entry]}


def _tidy(node: Any) -> Any:
    """Unify forms that differ between releases of pydantic, and drop titles, which help nobody."""
    if isinstance(node, float) and node.is_integer():
        return int(node)
    if isinstance(node, list):
        return [_tidy(item) for item in node]
    if not isinstance(node, dict):
        return node
    kept = {}
    for key, item in node.items():
        is_annotation = key == "title" and isinstance(item, str)
        is_double = key in ("enum", "type") and "const" in node
        if not is_annotation and not is_double:
            kept[key] = _tidy(item)
    if len(kept.get("allOf", ())) == 1:  # a reference with a description
        kept |= kept.pop("allOf")[0]
    return dict(sorted(kept.items())) if "$ref" in kept else kept


def outputs(root: Path) -> dict[Path, str]:
    """All generated files of a source tree with their content."""
    schema = json.dumps(json_schema(), indent=2, ensure_ascii=False) + "\n"
    return {
        root / "profiles" / "profile.schema.json": schema,
        root / "docs" / "user" / "profile-reference.md": reference_page(),
        root / "docs" / "user" / "known-profiles.md": known_page(root / "profiles"),
        root / "docs" / "user" / "from-llama-cpp.md": flags_page(),
    }


def stale(root: Path) -> list[str]:
    """A diff for each generated file that is stale."""
    diffs = []
    for path, wanted in outputs(root).items():
        found = path.read_text(encoding="utf-8") if path.is_file() else ""
        if found != wanted:
            name = str(path.relative_to(root))
            lines = difflib.unified_diff(
                found.splitlines(), wanted.splitlines(), name, f"{name} (generated)", lineterm=""
            )
            diffs.append("\n".join(lines))
    return diffs


def main(arguments: Sequence[str] | None = None) -> int:
    """The entry point. Returns the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m dyno.profiles.generate", description=__doc__.split("\n")[0]
    )
    parser.add_argument(
        "--check", action="store_true", help="write nothing; exit with 1 where a file is stale"
    )
    default_root = Path(__file__).resolve().parents[3]
    parser.add_argument("--root", type=Path, default=default_root, help="root of the source tree")
    options = parser.parse_args(arguments)
    if not (options.root / "pyproject.toml").is_file():
        print(f"{options.root} is not a source tree of dyno; give one with --root", file=sys.stderr)
        return 2
    if options.check:
        diffs = stale(options.root)
        for diff in diffs:
            print(diff)
        if diffs:
            print("stale; run: python -m dyno.profiles.generate", file=sys.stderr)
        return 1 if diffs else 0
    for path, text in outputs(options.root).items():
        write_atomically(path, text.encode())
        print(path)
    return 0


if __name__ == "__main__":
    sys.exit(main())
