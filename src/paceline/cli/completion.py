"""``paceline completion``: a script with which a shell completes commands, options and their values."""

from __future__ import annotations

import importlib
import re
from collections.abc import Callable, Mapping, Sequence

from paceline.cli import launch_options
from paceline.cli.app import COMMANDS
from paceline.cli.options import Option, Parser, UsageError
from paceline.consistency import weighting_names
from paceline.launch import names
from paceline.naming import suggestion

_DESCRIPTION = """\
Print a script that completes commands, options and their values. To use it in every new shell:

  bash   echo 'eval "$(paceline completion bash)"' >> ~/.bashrc
  zsh    echo 'eval "$(paceline completion zsh)"' >> ~/.zshrc     (after compinit)
  fish   paceline completion fish > ~/.config/fish/completions/paceline.fish"""

#: Values that are words of a list; what an option's metavar lists (``stop|continue``) need not be here.
_VALUES: Mapping[str, Callable[[], Sequence[str]]] = {"--launcher": names, "--weighting": weighting_names}


def run(name: str, words: Sequence[str]) -> int:
    """Print the script for a shell."""
    shells = [word for word in words if not word.startswith("-")]
    usage = f"paceline completion {'|'.join(_SHELLS)}"
    Parser(name, (), usage, _DESCRIPTION).parse([word for word in words if word.startswith("-")])
    if len(shells) != 1 or shells[0] not in _SHELLS:
        unknown = suggestion(shells[0], _SHELLS) if shells else ""
        raise UsageError(f"one shell is needed: {usage}{unknown}")
    print(_SHELLS[shells[0]](), end="")
    return 0


def options_of(command: str) -> Sequence[Option]:
    """Return the options of a command, as its module has them."""
    if command == "profile":
        return (*_table(command), *launch_options.OPTIONS)
    return _table(command)


def _table(command: str) -> Sequence[Option]:
    module, _, function = COMMANDS[command][0].partition(":")
    table = () if function else getattr(importlib.import_module(module), "OPTIONS", ())
    return table[command] if isinstance(table, Mapping) else table


def _values(option: Option) -> Sequence[str]:
    """Return the words that an option takes; nothing: any, which shells complete as a file."""
    listed = [word for word in (option.metavar or "").split("|") if word.islower()]
    return _VALUES[option.flags[-1]]() if option.flags[-1] in _VALUES else listed


def _flags(command: str) -> str:
    return " ".join(["--help", *(flag for option in options_of(command) for flag in option.flags)])


def _cases(lines: Mapping[str, str]) -> str:
    return "\n".join(f"        {pattern}) {line} ;;" for pattern, line in lines.items())


def _bash() -> str:
    values = {
        f"{command}:{flag}": f'words="{" ".join(_values(option))}"'
        for command in COMMANDS
        for option in options_of(command)
        for flag in option.flags
        if _values(option)
    }
    values["completion:completion"] = f'words="{" ".join(_SHELLS)}"'
    return f"""\
_paceline() {{
    local word=${{COMP_WORDS[COMP_CWORD]}} command=${{COMP_WORDS[1]}} index words=""
    COMPREPLY=()
    for ((index = 2; index < COMP_CWORD; index++)); do
        [[ ${{COMP_WORDS[index]}} == -- ]] && return  # the user's own command
    done
    if ((COMP_CWORD == 1)); then
        words="{" ".join(COMMANDS)} --help --version"
    else case $command:${{COMP_WORDS[COMP_CWORD - 1]}} in
{_cases(values)}
    esac fi
    [[ -z $words && $word == -* ]] && case $command in
{_cases({command: f'words="{_flags(command)}"' for command in COMMANDS})}
    esac
    COMPREPLY=($(compgen -W "$words" -- "$word"))
}}
complete -o default -F _paceline paceline
"""


def _zsh() -> str:
    # The same function: zsh has bash's built-ins for it.
    return f"autoload -Uz bashcompinit && bashcompinit\n{_bash()}"


def _fish() -> str:
    first = "complete -c paceline -f -n __fish_use_subcommand"
    lines = [f"{first} -l help", f"{first} -l version"]
    lines += [f"{first} -a {command} -d {_quoted(summary)}" for command, (_, summary) in COMMANDS.items()]
    for command in COMMANDS:
        is_ours = f"__fish_seen_subcommand_from {command}; and not contains -- -- (commandline -opc)"
        here = f"complete -c paceline -n '{is_ours}'"
        lines.append(f"{here} -l help")
        lines += [f"{here} {_fish_option(option)}" for option in options_of(command)]
    lines.append(f"complete -c paceline -f -n '__fish_seen_subcommand_from completion' -a '{' '.join(_SHELLS)}'")
    return "\n".join(lines) + "\n"


def _fish_option(option: Option) -> str:
    kinds = {r"-\w": "-s", r"-\w\w+": "-o", r"--.*": "-l"}
    words = [
        next(how for kind, how in kinds.items() if re.fullmatch(kind, flag)) + f" {flag.lstrip('-')}"
        for flag in option.flags
    ]
    values = _values(option)
    needs = [] if option.metavar is None else [f"-x -a {_quoted(' '.join(values))}"] if values else ["-r"]
    return " ".join([*words, *needs, f"-d {_quoted(option.help)}"])


def _quoted(text: str) -> str:
    """Return a text in fish's quotes."""
    return "'" + text.replace("\\", "\\\\").replace("'", "\\'") + "'"


_SHELLS: Mapping[str, Callable[[], str]] = {"bash": _bash, "zsh": _zsh, "fish": _fish}
