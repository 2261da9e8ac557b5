"""How programs of MultiPL-E's languages are compiled and run, and where the end of their tests is.

A program is its source and its tests in one file. It is not enough that it ends with code 0, as `exit(0)`
before the tests does: the last thing the tests do, put there by us, is to print a word that nobody can guess.

What a hostile program could still do, since it shares a process with its tests: find the word in its own file,
where the language keeps that, or in its memory, and print it; redefine what the tests compare with. That takes
a program written against this file. Python's rooms (players.py) withstand that too.
"""

import glob
import os
import re
import shlex
import shutil
import subprocess
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

ENVIRONMENT = {"LANG": "C.UTF-8", "OMP_NUM_THREADS": "1", "PATH": "/usr/local/bin:/usr/bin:/bin"}
NOT_COMPILED = 113  # exit code
Mark = Callable[[str, str], str]  # (tests, word) -> the tests, which print it at their end


def _at_end(line: str) -> Mark:
    return lambda tests, word: f"{tests.rstrip()}\n{line.format(word)}\n"


def _before(pattern: str, line: str) -> Mark:
    """Return a mark before the last match of `pattern`."""

    def mark(tests: str, word: str) -> str:
        matches = list(re.finditer(pattern, tests))
        if not matches:
            raise ValueError(f"the tests end without {pattern!r}")
        place = matches[-1].start()
        return f"{tests[:place]}\n{line.format(word)}\n{tests[place:]}"

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
    """A row of the table below; commands are split at white space, the first word is a program on the path."""

    file: str
    mark: Mark
    run: str
    compile: str = ""
    tools: tuple[str, ...] = ()  # needed beside the commands' own
    trial: str = ""  # ends with code 0 where a library that the tests use is installed
    library: str = ""  # its name
    fails: str = ""  # in the output of tests that failed, where the exit code does not say it
    address_space: bool = True  # False: it reserves much more than it uses
    environment: dict[str, str] = field(default_factory=dict)

    def programs(self) -> list[str]:
        """Return the programs on the path that it needs."""
        names = (*self.compile.split()[:1], self.run.split()[0], *self.tools)
        return [name for name in names if not name.startswith("./")]

    def script(self) -> tuple[str, dict[str, str], list[str]]:
        """Return the shell script that compiles and runs a program, its environment, and the folders it needs.

        A program that was compiled does not find its tests.
        """
        places = {name: place_of(name) for name in self.programs()}
        trees = [tree for _, tree in places.values() if tree] + (jars() if "{jars}" in self.run else [])
        compiling, running = (
            " ".join([shlex.quote(places.get(word, (word,))[0]) for word in words[:1]] + words[1:])
            for words in (self.compile.split(), self.run.split())
        )
        compiled = f"{compiling} || exit {NOT_COMPILED}; rm -f {self.file}; exec " if compiling else ""
        script = (compiled + running).replace("{jars}", shlex.quote(":".join(jars())))
        # A tool may be a script for another: tsc begins with "#!/usr/bin/env node".
        folders = dict.fromkeys([*(str(Path(path).parent) for path, _ in places.values()), ENVIRONMENT["PATH"]])
        return script, ENVIRONMENT | self.environment | {"PATH": ":".join(folders)}, trees


_LAST, _LAST_BUT_ONE = r"\}\s*$", r"\}\s*\}\s*$"
_JS = _at_end('console.log("{0}");')
_JAVA = "-XX:+UseSerialGC", "-XX:TieredStopAtLevel=1"
LANGUAGES = {
    "cpp": Language("main.cpp", _cpp, "./main", "g++ -std=c++17 main.cpp -o main"),
    "rs": Language(
        "main.rs",
        _before(_LAST, '    println!("{0}");'),
        "./main",
        "rustc main.rs -o main",
        tools=("cc",),
        address_space=False,
    ),
    "js": Language("main.js", _JS, "node main.js", address_space=False),
    "ts": Language(
        "main.ts", _JS, "node main.js", "tsc --target es2020 --lib es2020,dom main.ts", address_space=False
    ),
    "java": Language(
        "Problem.java",
        _before(_LAST_BUT_ONE, '    System.out.println("{0}");'),
        f"java -ea {' '.join(_JAVA)} -cp {{jars}}:. Problem",
        f"javac {' '.join(f'-J{option}' for option in _JAVA)} -cp {{jars}} Problem.java",
        library="the javatuples jar (on CLASSPATH or in /usr/share/java)",
        address_space=False,
    ),
    "pl": Language(
        "main.pl",
        _at_end('print "{0}\\n";'),
        "perl main.pl",
        trial="perl -MTest::Deep -e 1",
        library="perl's Test::Deep",
    ),
    "sh": Language("main.sh", _at_end("printf '%s\\n' '{0}'"), "bash main.sh"),
    "php": Language("main.php", _at_end('echo "{0}\\n";'), "php main.php"),
    "rb": Language(
        "main.rb",
        _before(r"\n\s*end\s*\nend\s*$", '    puts "{0}"'),
        "ruby main.rb",
        trial="ruby -rtest/unit -e exit!(0)",
        library="ruby's test-unit",
    ),
    "lua": Language("main.lua", _lua, "lua main.lua", trial="lua -e require('luaunit')", library="luaunit"),
    "r": Language("main.r", _at_end('cat("{0}\\n")'), "Rscript main.r"),
    "go": Language(
        "main_test.go",
        _before(_LAST, '\tif !t.Failed() {{ fmt.Println("{0}") }}'),
        "./main -test.v",
        "go test -c -o main main_test.go",
        address_space=False,
        environment={"GO111MODULE": "off", "GOCACHE": "/tmp/go", "GOFLAGS": "-p=2"},
    ),
    "d": Language(
        "main.d",
        _before(_LAST, 'import std.stdio : writeln; writeln("{0}");'),
        "./main --DRT-testmode=run-main",
        "ldc2 -unittest --of=main main.d",
        tools=("cc",),
    ),
    "cs": Language(
        "main.cs",
        _before(_LAST_BUT_ONE, '    Console.WriteLine("{0}");'),
        "mono main.exe",
        "mcs -d:DEBUG -r:System.Numerics.dll main.cs",
        fails="Fail:",
        address_space=False,
        environment={"MONO_TRACE_LISTENER": "Console.Error"},
    ),
    "rkt": Language(
        "main.rkt",
        _at_end('(displayln "{0}")'),
        "racket main.rkt",
        trial="racket -l rackunit",
        library="racket's rackunit",
        fails="FAILURE",
        address_space=False,
    ),
}


# A right program of every language and its tests, by which a sandbox is tried before it judges others: a room
# may lack what a tool needs, or give it too little time, and then every answer in that language would be wrong.
# The function gives 2 for 1 where %s is 1.
_RIGHT = {
    "cpp": (
        "#include<bits/stdc++.h>\nlong f(long x) {\n    return x + %s;\n",
        "}\nint main() {\n    assert(f(1) == 2);\n}\n",
    ),
    "rs": ("fn f(x: isize) -> isize {\n    x + %s\n", "}\nfn main() {\n    assert_eq!(f(1), 2);\n}\n"),
    "js": ("function f(x) {\n  return x + %s;\n}\n", "require('node:assert').deepEqual(f(1), 2);"),
    "ts": (
        "function f(x: number): number {\n  return x + %s;\n}\n",
        "declare var require: any;\nrequire('node:assert').deepEqual(f(1), 2);",
    ),
    "sh": ("f() {\n    echo $(($1 + %s))\n", "}\nset -e\n[[ $(f 1) = 2 ]]"),
    "pl": (
        "sub f {\n    my($x) = @_;\n    return $x + %s;\n}\n",
        "use Test::Deep;\nif (!eq_deeply(f(1), 2)) { exit 1; }\n",
    ),
    "java": (
        "import org.javatuples.*;\nclass Problem {\n    public static long f(long x) {\n    return x + %s;\n",
        "    }\n    public static void main(String[] args) {\n        assert(f(1l) == 2l);\n    }\n}\n",
    ),
    "php": (
        "<?php\nfunction f($x) {\n    return $x + %s;\n}\n",
        'if (f(1) !== 2) { throw new Exception("Test failed!"); }',
    ),
    "rb": (
        "def f(x)\n  x + %s\nend\n",
        "require 'test/unit'\nclass T < Test::Unit::TestCase\n  def test_f\n"
        "    assert_equal(2, f(1))\n  end\nend\n",
    ),
    "lua": (
        "local function f(x)\n    return x + %s\nend\n",
        "lu = require('luaunit')\nfunction test_f()\n    lu.assertEquals(f(1), 2)\nend\n"
        "os.exit(lu.LuaUnit.run())",
    ),
    "r": ("f <- function(x) {\n    x + %s\n}\n", "stopifnot(isTRUE(all.equal(f(1), 2)))"),
    "go": (
        'package f_test\nimport (\n    "testing"\n    "fmt"\n    "os"\n)\n'
        "func f(x int) int {\n    if x > 9 { os.Exit(0) }\n    return x + %s\n}\n",
        'func TestF(t *testing.T) {\n    if f(1) != 2 {\n        t.Errorf("wrong")\n    }\n}\n',
    ),
    "d": ("long f(long x) {\n    return x + %s;\n}\n", "unittest\n{\n    assert(f(1) == 2);\n}\nvoid main(){}"),
    "cs": (
        "using System;\nusing System.Diagnostics;\nclass Problem {\n"
        "    public static long F(long x) {\n        return x + %s;\n",
        "    }\n    public static void Main(string[] args) {\n        Debug.Assert(F(1L) == 2L);\n    }\n}\n",
    ),
    "rkt": ("#lang racket\n(define (f x)\n  (+ x %s))\n", "(require rackunit)\n(check-within (f 1) 2 0.001)\n"),
}


def right_program(language: str, term: str = "1") -> tuple[str, str]:
    """Return source and tests of a right program; with another term it is wrong."""
    source, tests = _RIGHT[language]
    return source.replace("%s", term, 1), tests


def check_tests(language: str, tests: str) -> None:
    """Raise ValueError for tests that lack the end by which those of their language are known."""
    if language in LANGUAGES:
        LANGUAGES[language].mark(tests, "")


def missing_toolchain(language: str) -> str | None:
    """Return what this machine lacks to judge programs of a language, in words, or None."""
    if language == "python":
        return None
    if language not in LANGUAGES:
        return f"a way to run {language} (there is one for python, {', '.join(LANGUAGES)})"
    row = LANGUAGES[language]
    for program in row.programs():
        if not shutil.which(program):
            return program
    return None if (jars() if language == "java" else _works(row.trial)) else row.library


@cache
def _works(command: str) -> bool:
    return not command or subprocess.run(command.split(), capture_output=True, check=False).returncode == 0


def jars() -> list[str]:
    """Return the javatuples library, as MultiPL-E's Java tests want it."""
    on_path = [path for path in os.environ.get("CLASSPATH", "").split(":") if "javatuples" in path]
    return [os.path.realpath(path) for path in (*on_path, *glob.glob("/usr/share/java/javatuples*.jar"))]


@cache
def place_of(program: str) -> tuple[str, str | None]:
    """Return where a program on the path really is, and the folder that it needs beside the system's."""
    link = shutil.which(program)
    if link is None:
        raise KeyError(program)
    path = Path(link).resolve()
    if path.name == "rustup":  # stands for the tools of whichever toolchain is chosen
        root = subprocess.run([link, "--print", "sysroot"], capture_output=True, text=True, check=True).stdout
        path = Path(root.strip(), "bin", program)
    # A program may ask by which name it was called: only its folder is made real.
    path = path if path.name == program else Path(link).parent.resolve() / program
    return str(path), None if str(path).startswith("/usr/") else str(path.parents[1])
