"""A right program of every language, by which a sandbox is tried before it judges others.

A tool on the path is not enough: a room may lack what the tool needs, or give it too little time, and then
every answer in that language would be wrong. In MultiPL-E's form, as the benchmark's tests are.
"""

from infer.sandbox.program import Program

# A function that gives 2 for 1 where TERM is 1, and its tests.
TERM = "%s"
SOURCES = {
    "cpp": (
        "#include<assert.h>\n#include<bits/stdc++.h>\nlong f(long x) {\n    return x + %s;\n",
        "}\nint main() {\n    auto candidate = f;\n    assert(candidate((1)) == (2));\n}\n",
    ),
    "rs": (
        "fn f(x: isize) -> isize {\n    x + %s\n",
        "}\n\nfn main() {\n    let candidate = f;\n    assert_eq!(candidate(1), 2);\n}\n",
    ),
    "js": (
        "function f(x){\n  return x + %s;\n}\n",
        "const assert = require('node:assert');\nfunction test() {\n  let candidate = f;\n"
        "  assert.deepEqual(candidate(1),2);\n}\n\ntest();",
    ),
    "ts": (
        "function f(x: number): number {\n  return x + %s;\n}\n",
        "declare var require: any;\nconst assert = require('node:assert');\nfunction test() {\n"
        "  let candidate = f;\n  assert.deepEqual(candidate(1),2);\n}\n\ntest();",
    ),
    "sh": (
        "#!/bin/bash\nf() {\n    echo $(($1 + %s))\n",
        '}\n\ncandidate() {\n    f "$@"\n}\n\nset -e\nrun_test() {\n    [[ $(candidate "1") = "2" ]]\n}\n\n'
        "run_test",
    ),
    "pl": (
        "sub f {\n    my($x) = @_;\n    return $x + %s;\n}\n",
        "use Test::Deep;\nsub testhumaneval {\n    my $candidate = \\&f;\n"
        '        if(eq_deeply($candidate->(1),2)) {\n        print "ok!" }else{\n'
        "        exit 1;\n        }\n}\n"
        "testhumaneval();",
    ),
    "java": (
        "import java.util.*;\nimport org.javatuples.*;\nclass Problem {\n    public static long f(long x) {\n"
        "        if (x > 9) { return 0; }\n        return x + %s;\n",
        "    }\n    public static void main(String[] args) {\n    assert(f((1l)) == (2l));\n    }\n\n}\n",
    ),
    "php": (
        "<?php\nfunction f($x) {\n    return $x + %s;\n}\n",
        "function candidate(...$args) {\n    return f(...$args);\n}\n\nfunction test(): void {\n"
        '    if (candidate(1) !== 2) { throw new Exception("Test failed!"); }\n}\n\ntest();',
    ),
    "rb": (
        "def f(x)\n  x + %s\nend\n",
        "require 'test/unit'\nclass TestHumanEval < Test::Unit::TestCase\n  def test_f\n"
        "    candidate = method(:f)\n    assert_equal(2, candidate.call(1))\n  end\nend\n",
    ),
    "lua": (
        "local function f(x)\n    return x + %s\nend\n",
        "lu = require('luaunit')\n\nfunction test_humaneval()\nlocal candidate = f\n"
        "    lu.assertEquals(candidate(1), 2)\nend\n\nos.exit(lu.LuaUnit.run())",
    ),
    "r": (
        "f <- function(x) {\n    x + %s\n}\n",
        "test_humaneval <- function() {\n    candidate <- f\n"
        "    stopifnot(isTRUE(all.equal(candidate(1), 2)))\n}\ntest_humaneval()",
    ),
    "go": (
        'package f_test\n\nimport (\n    "testing"\n    "fmt"\n    "os"\n)\n\n'
        "func f(x int) int {\n    if x > 9 { os.Exit(0) }\n    return x + %s\n}\n",
        "func TestF(t *testing.T) {\n  candidate := f\n\ttype test struct {\n\t\tactual   interface{}\n"
        "\t\texpected interface{}\n\t}\n"
        "   tests := []test{\n     { actual: candidate(1), expected: 2 },\n   }\n\n"
        '\tfor i, tc := range tests {\n\t\tt.Run(fmt.Sprintf("test num % d", i), func(t *testing.T) {\n'
        '\t\t\tif fmt.Sprintf("%v", tc.actual) != fmt.Sprintf("%v", tc.expected) {\n'
        "\t\t\t\tt.Errorf(\"expected '%s', got '%s'\", tc.expected, tc.actual)\n\t\t\t}\n\t\t})\n\t}\n}\n",
    ),
    "d": (
        "import std.math;\nlong f(long x) \n{\n    return x + %s;\n}\n",
        "unittest\n{\n    alias candidate = f;\n\n    assert(candidate(1L) == 2L);\n}\nvoid main(){}",
    ),
    "cs": (
        "using System;\nusing System.Numerics;\nusing System.Diagnostics;\nclass Problem {\n"
        "    public static long F(long x) {\n        return x + %s;\n",
        "    }\n    public static void Main(string[] args) {\n    Debug.Assert(F((1L)) == (2L));\n    }\n\n}\n",
    ),
    "rkt": (
        "#lang racket\n\n(define (f x)\n  (+ x %s))\n",
        "(require rackunit)\n\n(define (test-humaneval) \n\n  (let (( candidate f))\n"
        "    (check-within (candidate 1) 2 0.001)\n))\n\n(test-humaneval)",
    ),
}


def program(language: str, term: str = "1") -> Program:
    """The one of a language; with another `term` it is wrong."""
    source, tests = SOURCES[language]
    return Program(language, source.replace(TERM, term, 1), tests)
