"""Typed configuration: defaults < YAML files < `--set a.b=c`, checked into a frozen tree.

`extends: FILE` at the top of a YAML file (relative to it) takes all keys of FILE for those that are
not given: section by section, a list whole, or by position where its place is a mapping of numbers
(`phases: {0: {steps: 100}}`).

Each room defines its tree beside the code it configures, as subclasses of `Config`, every field
with a description (and its unit). This file only reads, checks, prints and explains such trees.
"""

from __future__ import annotations

import argparse
import difflib
import itertools
import os
import re
import types
import typing
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, TypeVar

import pydantic
import pydantic_core
import yaml

from core.errors import UserError, short
from core.files import disk_errors, open_regular
from core.urls import is_url, on_this_machine

C = TypeVar("C", bound="Config")

_TYPE_NAMES = {str: "text", int: "whole number", float: "number", bool: "true | false"}


class Config(pydantic.BaseModel):
    """Base of every configuration tree: frozen, no unknown keys, defaults are checked too."""

    model_config = pydantic.ConfigDict(
        frozen=True, extra="forbid", validate_default=True, allow_inf_nan=False
    )

    @pydantic.field_validator("*", mode="before")
    @classmethod
    def _no_character_that_no_name_has(cls, value: Any, info: pydantic.ValidationInfo) -> Any:
        field = cls.model_fields[info.field_name or ""]
        # Sections look at their own fields, and name them.
        for text in (value,) if _nested(field.annotation) is not None else _scalars(value):
            if isinstance(text, str) and re.search("[\0\ud800-\udc7f\udd00-\udfff]", text):
                raise ValueError(f"a character that no file's name can have, given {text[:200]!a}")
        return value

    @pydantic.field_validator("*")
    @classmethod
    def _no_number_that_is_none_of_a_machine(cls, value: Any) -> Any:
        numbers = value if isinstance(value, tuple) else (value,)
        for number in value.values() if isinstance(value, dict) else numbers:
            if isinstance(number, int | float) and abs(number) >= 2**63:
                raise ValueError("a number below 2^63 is expected")
        return value

    @pydantic.model_validator(mode="before")
    @classmethod
    def _no_bool_or_fraction_by_accident(cls, data: Any) -> Any:
        # Lax mode would take `true` for 1, "yes" for True and 1 for True: almost surely mistakes.
        if isinstance(data, dict):
            for name, field in cls.model_fields.items():
                allowed = _plain_types(field.annotation)
                value = data.get(name)
                if isinstance(value, bool) and allowed & {int, float} and bool not in allowed:
                    raise ValueError(f"{name}: a number is expected, not {_yaml(value)}")
                if bool in allowed and value is not None and not isinstance(value, bool):
                    if type(value) not in allowed:
                        raise ValueError(f"{name}: true or false is expected, not {_yaml(value)}")
        return data


def _local(path: str) -> str:
    try:
        return on_this_machine(path)
    except UserError as error:
        raise ValueError(str(error)) from None


LocalPath = Annotated[str, pydantic.AfterValidator(_local)]
PathOrUrl = Annotated[str, pydantic.AfterValidator(lambda x: x if is_url(x) else _local(x))]


def load(
    path: str | Path | None,
    model: type[C],
    overrides: Sequence[str] = (),
    fill: Callable[[Any], Any] = lambda tree: tree,
) -> C:
    """Read `path` (YAML; None: defaults only), apply `a.b=c` overrides in order, check the tree.

    Values of overrides are parsed as YAML; list items are named by position (`phases.0.steps`).
    `fill`: gives the plain tree keys that follow from others, before it is checked.
    Raises UserError naming file, key, the value given and what is allowed.
    """
    tree = _read(Path(path), ()) if path is not None else {}
    where = str(path) if path is not None else "defaults"
    return check(fill(overridden(tree, overrides)), model, where)


def override(key: str, value: Any) -> str:
    """KEY=VALUE of plain data as it is, a text that looks like YAML too."""
    text = yaml.safe_dump(value, default_flow_style=True, width=10**6)
    return f"{key}={text.removesuffix(chr(10)).removesuffix(chr(10) + '...')}"


def overridden(tree: Any, overrides: Sequence[str]) -> Any:
    """Plain data with `a.b=c` overrides applied in order; `tree` stays as it is."""
    for override in overrides:
        tree = _override(tree, override)
    return tree


def _read(path: Path, extended_by: tuple[Path, ...]) -> Any:
    """The plain tree of a file and of what it extends; `extended_by`: the files on the way here."""
    if len(extended_by) >= _MOST_EXTENDED:
        raise UserError(f"{path}: extends: {_MOST_EXTENDED} files extend each other")
    try:
        with disk_errors(path), open_regular(path) as file:
            data = file.read(_MOST_BYTES + 1)
        real = Path(os.path.realpath(path))
        text = data.decode("utf-8")
    except UnicodeDecodeError:
        raise UserError(f"{path}: the config is not UTF-8 text") from None
    except ValueError as error:  # of a name with a zero byte
        raise UserError(f"{path}: {error}") from None
    if real in extended_by:
        chain = " -> ".join(str(p) for p in (*extended_by, real))
        raise UserError(f"{path}: extends goes in a circle: {chain}")
    if len(data) > _MOST_BYTES:
        raise UserError(f"{path}: more than {_MOST_BYTES:,} bytes: is it a config?")
    try:
        tree = _parse(text)
    except ValueError as error:
        raise UserError(f"{path}: not valid YAML: {error}") from None
    tree = {} if tree is None else tree
    if not isinstance(tree, dict):
        raise UserError(f"{path}: expected `key: value` lines at the top, found {_yaml(tree)}")
    if "extends" not in tree:
        return tree
    base = tree.pop("extends")
    if not isinstance(base, str):
        raise UserError(f"{path}: extends: a file is expected, given {_yaml(base)}")
    below = _read(path.parent / base, (*extended_by, real))
    try:
        return _merge(below, tree, "")
    except ValueError as error:
        raise UserError(f"{path}: {error}") from None


def _merge(below: Any, above: Any, key: str) -> Any:
    """`above` where it says something, `below` elsewhere; `key`: where both stand, with a dot."""
    if isinstance(below, list) and isinstance(above, dict) and above:
        items = list(below)
        for place, value in above.items():
            if not isinstance(place, int) or not 0 <= place < len(items):
                raise ValueError(
                    f"{key}{place}: not a position in the list of the extended file "
                    f"({f'0 to {len(items) - 1}' if items else 'it is empty'})"
                )
            items[place] = _merge(items[place], value, f"{key}{place}.")
        return items
    if isinstance(below, dict) and isinstance(above, dict):
        both = {k: _merge(below[k], v, f"{key}{k}.") for k, v in above.items() if k in below}
        return below | above | both
    return above


def check(tree: Any, model: type[C], where: str) -> C:
    """Validate plain data into `model`; UserError lists every wrong key, one clause each."""
    try:
        return model.model_validate(tree)
    except pydantic.ValidationError as error:
        found = error.errors()
        # A list whose items are wrong, or hold what is wrong, is not "too short".
        inner = {e["loc"][:n] for e in found for n in range(len(e["loc"]))}
        wrong = [e for e in found if e["type"] != "too_short" or e["loc"] not in inner]
        clauses = [_clause(e, model) for e in wrong[:_MOST_CLAUSES]]
        if len(wrong) > _MOST_CLAUSES:
            clauses.append(f"and {len(wrong) - _MOST_CLAUSES} more")
        raise UserError(f"{where}: " + "; ".join(dict.fromkeys(clauses))) from None


def dump(config: Config) -> str:
    """The resolved tree as YAML; `load` of it gives the same tree."""
    plain = config.model_dump(mode="json")
    text = yaml.safe_dump(plain, sort_keys=False, allow_unicode=True)
    # PyYAML writes U+0085 as it is, and reads it as a blank.
    return yaml.safe_dump(plain, sort_keys=False) if "\x85" in text else text


def differences(
    old: Mapping[str, Any], new: Mapping[str, Any], prefix: str = ""
) -> dict[str, list[Any]]:
    """Dotted keys whose values differ between two plain trees: {key: [old, new]}."""
    found: dict[str, list[Any]] = {}
    for key in sorted({*old, *new}):
        a, b = old.get(key), new.get(key)
        if isinstance(a, list | tuple) and isinstance(b, list | tuple) and len(a) == len(b):
            a, b = ({str(i): x for i, x in enumerate(items)} for items in (a, b))
        if isinstance(a, Mapping) and isinstance(b, Mapping):
            found |= differences(a, b, f"{prefix}{key}.")
        elif a != b:
            found[prefix + key] = [a, b]
    return found


def leaves(tree: Any, prefix: str = "") -> dict[str, Any]:
    """The values of a plain tree by dotted key, those of lists by place; empty ones have none."""
    pairs = enumerate(tree) if isinstance(tree, list) else tree.items()
    found = {}
    for name, value in pairs:
        key = f"{prefix}{name}"
        found |= leaves(value, f"{key}.") if isinstance(value, dict | list) else {key: value}
    return found


def describe(model: type[Config]) -> str:
    """All keys of a tree with type, default and description, for `--help`."""
    lines = []
    for key, field in _walk(model):
        kind = _type_name(field.annotation)
        default = field.get_default(call_default_factory=True)
        nested = _nested(field.annotation) is not None
        if field.is_required():
            shown = "required"
        elif nested:
            shown = ""
        else:
            plain = default.model_dump() if isinstance(default, Config) else default
            shown = f"default {_yaml(plain)}"
        facts = ", ".join(x for x in (kind if not nested else "section", shown) if x)
        lines.append(f"  {key}  ({facts})")
        if field.description:
            lines.append(f"      {field.description}")
    return "\n".join(lines)


def add_overrides(parser: argparse.ArgumentParser, help_text: str) -> None:
    """The argument --set KEY=VALUE ..., which may be repeated, as `overrides`."""
    parser.add_argument(
        "--set",
        dest="overrides",
        action="extend",
        nargs="+",
        default=[],
        metavar="KEY=VALUE",
        help=help_text,
    )


def parser(
    model: type[Config],
    description: str,
    *,
    prog: str | None = None,
    config_required: bool = True,
) -> argparse.ArgumentParser:
    """An argument parser with --config, --set and --print-config whose --help lists every key."""
    result = argparse.ArgumentParser(
        prog=prog,
        description=description,
        epilog="keys (set in the YAML file or by --set key=value):\n" + describe(model),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    result.add_argument("--config", required=config_required, metavar="FILE", help="a YAML file")
    add_overrides(result, "override keys of the file, for example --set phases.0.steps=100 seed=7")
    result.add_argument(
        "--print-config", action="store_true", help="print the resolved tree and stop"
    )
    return result


_MOST_CLAUSES = 30  # of a message
_MOST_VALUES = 100_000  # of a file, its aliases written out
_DEEPEST = 50  # levels of a file, a value or a key: pydantic writes 255 of all three together
_MOST_BYTES = 1_000_000  # of a file
_MOST_EXTENDED = 50  # files, one by the other


def is_mapping(text: str) -> bool:
    """Whether a text is a mapping in YAML. Time: its length by the depth of its brackets."""
    try:
        events = list(yaml.parse(text, yaml.SafeLoader))
    except (yaml.YAMLError, ValueError, OverflowError):  # of a character's number
        return False
    return any(isinstance(event, yaml.MappingStartEvent) for event in events[2:3])


def _parse(text: str) -> Any:
    """The plain data of a YAML text. ValueError, in one line, for a text that is none."""
    loader = None
    try:
        loader = _UniqueKeyLoader(text)
        node = loader.get_single_node()
        if node is None:
            return None
        _count(node, {})
        return loader.construct_document(node)
    # PyYAML's constructors let through what int(), date() and their like raise.
    except (yaml.YAMLError, ValueError, TypeError, AttributeError, LookupError) as error:
        raise ValueError(" ".join(str(error).split()) or type(error).__name__) from None
    except (OverflowError, RecursionError) as error:
        raise ValueError(f"nested too deeply or too large: {error}") from None
    finally:
        if loader is not None:
            loader.dispose()


def _count(node: yaml.Node, counted: dict[yaml.Node, tuple[int, int]]) -> tuple[int, int]:
    """Values in the tree below `node`, and its levels; ValueError where aliases make a giant of it,
    or it is deeper than a configuration."""
    if counted.get(node) == (0, 0):
        raise ValueError(f"an alias inside of what it stands for{node.start_mark}")
    if node not in counted:
        counted[node] = 0, 0
        children = node.value if isinstance(node, yaml.CollectionNode) else ()
        pairs = isinstance(node, yaml.MappingNode)
        below = (n for child in children for n in (child if pairs else (child,)))
        values, levels = 1, 1
        for found, deep in (_count(n, counted) for n in below):
            values, levels = values + found, max(levels, 1 + deep)
        if values > _MOST_VALUES:
            raise ValueError(f"more than {_MOST_VALUES} values, aliases written out")
        if levels > _DEEPEST:
            raise ValueError(f"nested over {_DEEPEST} deep")
        counted[node] = values, levels
    return counted[node]


class _UniqueKeyLoader(yaml.SafeLoader):
    """PyYAML keeps the last of two equal keys in silence; here that is an error."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: set[Any] = set()
        for key_node, _ in node.value:
            key = self.construct_object(key_node, deep=True)
            if isinstance(key, (list, dict)):
                raise yaml.constructor.ConstructorError(
                    None, None, f"{_yaml(key)} is no key", key_node.start_mark
                )
            if key in seen:
                raise yaml.constructor.ConstructorError(
                    None, None, f"key {key!r} appears twice", key_node.start_mark
                )
            seen.add(key)
        return super().construct_mapping(node, deep)

    def construct_yaml_int(self, node: yaml.ScalarNode) -> int:
        number = super().construct_yaml_int(node)
        str(number)  # ValueError: no message could show it, and no dump
        return number

    def construct_scalar(self, node: yaml.ScalarNode) -> Any:
        # JSON writes a character beyond U+FFFF as two escapes.
        return re.sub(
            "[\ud800-\udbff][\udc00-\udfff]",
            lambda pair: pair[0].encode("utf-16", "surrogatepass").decode("utf-16"),
            super().construct_scalar(node),
        )


_INT, _FLOAT = "tag:yaml.org,2002:int", "tag:yaml.org,2002:float"
_UniqueKeyLoader.add_constructor(_INT, _UniqueKeyLoader.construct_yaml_int)
# Numbers as in YAML 1.2: 010 is not 8, and 1:30 not 90.
_UniqueKeyLoader.yaml_implicit_resolvers = {
    first: [(tag, form) for tag, form in forms if tag not in (_INT, _FLOAT)]
    for first, forms in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
_UniqueKeyLoader.add_implicit_resolver(
    _INT,
    re.compile(r"[-+]?(?:0|[1-9][0-9_]*|0b[01_]+|0x[0-9a-fA-F_]+)\Z"),
    list("-+0123456789"),
)
_UniqueKeyLoader.add_implicit_resolver(
    _FLOAT,
    re.compile(
        r"[-+]?(?:[0-9][0-9_]*\.[0-9_]*(?:[eE][-+][0-9]+)?|\.[0-9][0-9_]*(?:[eE][-+][0-9]+)?"
        r"|\.(?:inf|Inf|INF))\Z|\.(?:nan|NaN|NAN)\Z"
    ),
    list("-+0123456789."),
)


def _override(tree: Any, override: str) -> Any:
    key, equals, text = override.partition("=")
    if not equals or not key:
        raise UserError(f"--set {short(override, 200)}: expected key=value")
    if key.count(".") > _DEEPEST:
        raise UserError(f"--set {short(override, 200)}: nested over {_DEEPEST} deep")
    try:
        value = _parse(text)
    except ValueError:
        value = text
    if re.match(r"""(?!\s*["'[{]).*(?<!\S)#""", text, re.DOTALL):
        value = text  # a name, of which YAML would take the rest for a comment
    elif isinstance(value, str) and re.match(r"""(?!\s*["'|>]).*[\n\r\x85\u2028\u2029]""", text):
        value = text  # a name, of which YAML would make a line's end a blank
    result = at = _copy(tree)
    *parents, last = key.split(".")
    for part in parents:
        at = _child(at, part, override)
    if isinstance(at, list):
        at[_position(at, last, override)] = value
    elif isinstance(at, dict):
        at[last] = value
    else:
        raise UserError(f"--set {override}: {'.'.join(parents)} is a value, not a section")
    return result


def _child(at: Any, part: str, override: str) -> Any:
    if isinstance(at, list):
        return at[_position(at, part, override)]
    if isinstance(at, dict):
        if at.get(part) is None:
            at[part] = {}
        return at[part]
    raise UserError(f"--set {override}: {part} lies below a value, not a section")


def _position(items: list[Any], part: str, override: str) -> int:
    number = part.isascii() and part.isdigit() and len(part) < 10
    if not number or int(part) >= len(items):
        allowed = f"0 to {len(items) - 1}" if items else "none: the list is empty"
        raise UserError(f"--set {override}: {part} is not a position in the list ({allowed})")
    return int(part)


def _copy(tree: Any) -> Any:
    if isinstance(tree, dict):
        return {k: _copy(v) for k, v in tree.items()}
    if isinstance(tree, list):
        return [_copy(v) for v in tree]
    return tree


def _clause(error: pydantic_core.ErrorDetails, model: type[Config]) -> str:
    path = [short(str(p), 100) for p in error["loc"]]
    key = ".".join(path)
    given = _yaml(error.get("input"))
    kind = error["type"]
    if kind == "extra_forbidden":
        known = _keys_at(model, path[:-1])
        near = difflib.get_close_matches(path[-1], known, n=1, cutoff=0.5)
        everywhere = [k for k, _ in _walk(model) if k.rsplit(".", 1)[-1] == path[-1]]
        if everywhere:
            hint = f"did you mean {everywhere[0]}?"
        elif near:
            hint = f"did you mean {'.'.join([*path[:-1], near[0]])}?"
        else:
            hint = f"allowed here: {', '.join(known)}"
        return f"{key}: unknown key (given {given}); {hint}"
    if kind == "missing":
        return f"{key}: required key is missing"
    if kind == "value_error":
        message = error["msg"].removeprefix("Value error, ")
        if key and re.match(r"[\w.]+: ", message):  # a validator that named the field itself
            return f"{key}.{message}"
        return f"{key}: {message}" if key else message
    message = error["msg"][0].lower() + error["msg"][1:]
    return f"{key}: {message}, given {given}"


def _keys_at(model: type[Config], path: Sequence[str]) -> list[str]:
    at: Any = model
    for part in path:
        if part.isdigit():
            continue
        field = at.model_fields.get(part) if at is not None else None
        at = _nested(field.annotation) if field is not None else None
    return list(at.model_fields) if at is not None else []


def _walk(model: type[Config], prefix: str = "") -> Iterator[tuple[str, pydantic.fields.FieldInfo]]:
    for name, field in model.model_fields.items():
        key = prefix + name
        yield key, field
        nested = _nested(field.annotation)
        if nested is not None:
            inner = ".N." if _is_list(field.annotation) else "."
            yield from _walk(nested, key + inner)


def _is_list(annotation: object) -> bool:
    if typing.get_origin(annotation) in (list, tuple):
        return True
    return any(_is_list(a) for a in typing.get_args(annotation) if a is not ...)


def _scalars(value: Any) -> Iterator[Any]:
    """What plain data holds, keys too."""
    if isinstance(value, list | tuple | dict):
        for item in [*value, *value.values()] if isinstance(value, dict) else value:
            yield from _scalars(item)
    else:
        yield value


def _nested(annotation: object) -> type[Config] | None:
    if isinstance(annotation, type) and not typing.get_origin(annotation):
        return annotation if issubclass(annotation, Config) else None
    for argument in typing.get_args(annotation):
        found = _nested(argument)
        if found is not None:
            return found
    return None


def _plain_types(annotation: object) -> set[type]:
    origin = typing.get_origin(annotation)
    if origin in (typing.Union, types.UnionType):
        return set().union(*(_plain_types(a) for a in typing.get_args(annotation)))
    if origin is typing.Annotated:
        return _plain_types(typing.get_args(annotation)[0])
    if origin is typing.Literal:
        return {type(a) for a in typing.get_args(annotation)}
    return {annotation} if isinstance(annotation, type) else set()


def _type_name(annotation: object) -> str:
    origin = typing.get_origin(annotation)
    if origin is typing.Literal:
        return " | ".join(_yaml(a) for a in typing.get_args(annotation))
    if origin in (typing.Union, types.UnionType):
        return " | ".join(_type_name(a) for a in typing.get_args(annotation))
    if origin is typing.Annotated:
        return _type_name(typing.get_args(annotation)[0])
    if annotation is type(None):
        return "null"
    if origin is dict:
        return f"name: {_type_name(typing.get_args(annotation)[1])}"
    if isinstance(annotation, type) and not origin:
        return _TYPE_NAMES.get(annotation, annotation.__name__)
    return re.sub(r"\b\w+\.", "", str(annotation))


def _beginning(value: Any, depth: int = 8) -> Any:
    """As much of a plain value as a message can show: what is wrong may be megabytes."""
    if isinstance(value, str):
        return value[:200]
    if isinstance(value, dict | list | tuple) and depth == 0:
        return "..."
    if isinstance(value, dict):
        first = itertools.islice(value.items(), 50)
        return {_beginning(k): _beginning(v, depth - 1) for k, v in first}
    if isinstance(value, list | tuple):
        return [_beginning(v, depth - 1) for v in value[:50]]
    return value


def _yaml(value: object) -> str:
    plain = _beginning(str(value) if isinstance(value, Path) else value)
    text = yaml.safe_dump(plain, default_flow_style=True, allow_unicode=True, width=10**6)
    text = text.removesuffix("\n").removesuffix("\n...").strip()
    return text if len(text) <= 120 else text[:117] + "..."
