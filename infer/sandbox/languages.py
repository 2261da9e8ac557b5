"""How programs of MultiPL-E's languages are compiled and run, and where the end of their tests is.

A program is its source and its tests in one file. Ending with code 0 is not enough, `exit(0)` before the
tests does that: the tests' last act, put there by us, is to print a word that nobody can guess.

What a hostile program could still do, since it shares a process with its tests: find the word in its own
file, where the language keeps that, or in its memory, and print it; redefine what the tests compare with.
That takes a program written against this file. Python's rooms (python.py) withstand that too.
"""

import glob
import os
import re
import shutil
import subprocess
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

Mark = Callable[[str, str], str]  # (tests, word) -> the tests, which print it at their end


def _at_end(line: str) -> Mark:
    return lambda tests, word: f"{tests.rstrip()}\n{line.format(word)}\n"


def _before(pattern: str, line: str) -> Mark:
    """Before the last place where `pattern` is found."""

    def mark(tests: str, word: str) -> str:
        places = [found.start() for found in re.finditer(pattern, tests)]
        if not places:
            raise ValueError(f"the tests end without {pattern!r}")
        return f"{tests[: places[-1]]}\n{line.format(word)}\n{tests[places[-1] :]}"

    return mark


def _cpp(tests: str, word: str) -> str:
    # The program may have switched assert off.
    asserting = tests.replace("int main()", "#undef NDEBUG\n#undef assert\n#include <assert.h>\nint main()", 1)
    return _before(r"\}", '    std::cout << "{0}" << std::endl;')(asserting, word)


def _lua(tests: str, word: str) -> str:
    last, ending = "os.exit(lu.LuaUnit.run())", f'if code == 0 then print("{word}") end\nos.exit(code)'
    if last not in tests:
        raise ValueError(f"the tests end without {last!r}")
    return tests.replace(last, f"local code = lu.LuaUnit.run()\n{ending}")


@dataclass(frozen=True)
class Language:
    """One row of the table below; commands are words, the first a program on the path."""

    file: str
    mark: Mark
    run: tuple[str, ...]
    compile: tuple[str, ...] = ()
    tools: tuple[str, ...] = ()  # wanted beside the commands' own
    trial: tuple[str, ...] = ()  # ends with code 0 where a library that the tests use is there
    library: str = ""  # its name
    fails: str = ""  # in the output of tests that failed, where the exit code does not say it
    address_space: bool = True  # False: it reserves much more than it uses
    environment: dict[str, str] = field(default_factory=dict)


_MAIN = ("./main",)
_LAST, _LAST_BUT_ONE = r"\}\s*$", r"\}\s*\}\s*$"
LANGUAGES = {
    "cpp": Language("main.cpp", _cpp, _MAIN, ("g++", "-std=c++17", "main.cpp", "-o", "main")),
    "rs": Language(
        "main.rs",
        _before(_LAST, '    println!("{0}");'),
        _MAIN,
        ("rustc", "main.rs", "-o", "main"),
        tools=("cc",),
        address_space=False,
    ),
    "js": Language("main.js", _at_end('console.log("{0}");'), ("node", "main.js"), address_space=False),
    "ts": Language(
        "main.ts",
        _at_end('console.log("{0}");'),
        ("node", "main.js"),
        ("tsc", "--target", "es2020", "--lib", "es2020,dom", "main.ts"),
        address_space=False,
    ),
    "java": Language(
        "Problem.java",
        _before(_LAST_BUT_ONE, '    System.out.println("{0}");'),
        ("java", "-ea", "-XX:+UseSerialGC", "-XX:TieredStopAtLevel=1", "-cp", "{jars}:.", "Problem"),
        ("javac", "-J-XX:+UseSerialGC", "-J-XX:TieredStopAtLevel=1", "-cp", "{jars}", "Problem.java"),
        library="the javatuples jar (on CLASSPATH or in /usr/share/java)",
        address_space=False,
    ),
    "pl": Language(
        "main.pl",
        _at_end('print "{0}\\n";'),
        ("perl", "main.pl"),
        trial=("perl", "-MTest::Deep", "-e", "1"),
        library="perl's Test::Deep",
    ),
    "sh": Language("main.sh", _at_end("printf '%s\\n' '{0}'"), ("bash", "main.sh")),
    "php": Language("main.php", _at_end('echo "{0}\\n";'), ("php", "main.php")),
    "rb": Language(
        "main.rb",
        _before(r"\n\s*end\s*\nend\s*$", '    puts "{0}"'),
        ("ruby", "main.rb"),
        trial=("ruby", "-rtest/unit", "-e", "exit!(0)"),
        library="ruby's test-unit",
    ),
    "lua": Language(
        "main.lua", _lua, ("lua", "main.lua"), trial=("lua", "-e", "require('luaunit')"), library="luaunit"
    ),
    "r": Language("main.r", _at_end('cat("{0}\\n")'), ("Rscript", "main.r")),
    "go": Language(
        "main_test.go",
        _before(_LAST, '\tif !t.Failed() {{ fmt.Println("{0}") }}'),
        ("./main", "-test.v"),
        ("go", "test", "-c", "-o", "main", "main_test.go"),
        address_space=False,
        environment={"GO111MODULE": "off", "GOCACHE": "/tmp/go", "GOFLAGS": "-p=2"},
    ),
    "d": Language(
        "main.d",
        _before(_LAST, 'import std.stdio : writeln; writeln("{0}");'),
        ("./main", "--DRT-testmode=run-main"),
        ("ldc2", "-unittest", "--of=main", "main.d"),
        tools=("cc",),
    ),
    "cs": Language(
        "main.cs",
        _before(_LAST_BUT_ONE, '    Console.WriteLine("{0}");'),
        ("mono", "main.exe"),
        ("mcs", "-d:DEBUG", "-r:System.Numerics.dll", "main.cs"),
        fails="Fail:",
        address_space=False,
        environment={"MONO_TRACE_LISTENER": "Console.Error"},
    ),
    "rkt": Language(
        "main.rkt",
        _at_end('(displayln "{0}")'),
        ("racket", "main.rkt"),
        trial=("racket", "-l", "rackunit"),
        library="racket's rackunit",
        fails="FAILURE",
        address_space=False,
    ),
}


def check_tests(language: str, tests: str) -> None:
    """Raises ValueError for tests without an end that a language's have; those of others are not known."""
    if language in LANGUAGES:
        LANGUAGES[language].mark(tests, "")


def missing_toolchain(language: str) -> str | None:
    """What this machine lacks to judge programs of a language, in words; None where it lacks nothing."""
    if language == "python":
        return None
    if language not in LANGUAGES:
        return f"a way to run {language} (there is one for python, {', '.join(LANGUAGES)})"
    found = LANGUAGES[language]
    for tool in tools(found):
        if not shutil.which(tool):
            return tool
    lacks = not jars() if language == "java" else not _works(found.trial)
    return found.library if lacks else None


def tools(language: Language) -> list[str]:
    """The programs on the path that a language needs."""
    named = (*language.compile[:1], language.run[0], *language.tools)
    return [tool for tool in named if not tool.startswith("./")]


@cache
def _works(command: tuple[str, ...]) -> bool:
    return not command or subprocess.run(command, capture_output=True, check=False).returncode == 0


def jars() -> list[str]:
    """The javatuples library, as MultiPL-E's Java tests want it."""
    named = [path for path in os.environ.get("CLASSPATH", "").split(":") if "javatuples" in path]
    return [os.path.realpath(path) for path in (*named, *glob.glob("/usr/share/java/javatuples*.jar"))]


@cache
def place_of(tool: str) -> tuple[str, str | None]:
    """Where a program really is, and the folder that it needs beside the system's. Raises KeyError where it
    is not on the path.
    """
    found = shutil.which(tool)
    if found is None:
        raise KeyError(tool)
    path = Path(found).resolve()
    if path.name == "rustup":  # stands for the tools of whichever toolchain is chosen
        told = subprocess.run([found, "--print", "sysroot"], capture_output=True, text=True, check=True)
        path = Path(told.stdout.strip(), "bin", tool)
    # A program may ask by which name it was called: only its folder is made real.
    path = path if path.name == tool else Path(found).parent.resolve() / tool
    return str(path), None if str(path).startswith("/usr/") else str(path.parents[1])


def folder_of(tool: str) -> str:
    """The folder in which a room finds a program."""
    return str(Path(place_of(tool)[0]).parent)


def command(words: tuple[str, ...]) -> tuple[list[str], list[str]]:
    """The words as a command with its program's place, and the folders that it needs."""
    words = tuple(word.replace("{jars}", ":".join(jars())) for word in words)
    if words[0].startswith("./"):
        return list(words), []
    path, tree = place_of(words[0])
    return [path, *words[1:]], [tree] if tree else []
