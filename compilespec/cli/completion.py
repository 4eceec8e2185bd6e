"""`compilespec completion`: a script that completes commands and flags in bash or zsh."""

from __future__ import annotations

import argparse

BASH = """\
# eval "$(compilespec completion bash)"
_compilespec() {{
    local word="${{COMP_WORDS[COMP_CWORD]}}" words
    if [ "$COMP_CWORD" -eq 1 ]; then
        words="{commands}"
    else
        case "${{COMP_WORDS[1]}}" in
{cases}
        esac
    fi
    COMPREPLY=($(compgen -W "$words" -- "$word"))
    [ ${{#COMPREPLY[@]}} -gt 0 ] || COMPREPLY=($(compgen -f -- "$word"))
}}
complete -F _compilespec compilespec
"""
ZSH = """\
# eval "$(compilespec completion zsh)"
autoload -U +X compinit && compinit -u
autoload -U +X bashcompinit && bashcompinit
"""


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser(
        "completion",
        help="print a script for a shell's completion",
        description='Complete commands and flags: put  eval "$(compilespec completion bash)"  into '
        "~/.bashrc, or the same with zsh into ~/.zshrc.",
    )
    parser.add_argument("shell", choices=("bash", "zsh"))
    parser.set_defaults(run=run, commands=commands)


def run(args: argparse.Namespace) -> int:
    print((ZSH if args.shell == "zsh" else "") + script(args.commands.choices), end="")
    return 0


def script(commands: dict[str, argparse.ArgumentParser]) -> str:
    """The script for bash; zsh runs it through `bashcompinit`."""
    cases = "\n".join(
        f'            {name}) words="{" ".join(_words(one))}" ;;' for name, one in commands.items()
    )
    return BASH.format(commands=" ".join(("demo", *commands, "--help", "--version")), cases=cases)


def _words(parser: argparse.ArgumentParser) -> list[str]:
    """The flags, and the words that a place without a flag takes."""
    words: list[str] = []
    for action in parser._actions:
        words += [one for one in action.option_strings if one.startswith("--")]
        if not action.option_strings:
            words += map(str, action.choices or ())
    return words
