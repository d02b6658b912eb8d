"""Two programs that talk through pipes, each in a sandbox of its own: the candidate's room and the examiner's.

    examiner.py   tests, expected values   -- call f(1, 2) -->   driver.py   the candidate's program
                                           <-- its result ---

The candidate's room holds its program and gets the arguments of one call after another: there is no test in it to read,
no comparison to patch, no verdict to print. Values travel as JSON with the types of Python's literals; what comes back
is rebuilt from those types alone, so that a result cannot bring an `__eq__` of its own. The examiner's room does
nothing for the candidate but read its answers.

These texts run inside the sandbox, on any Python 3.8 or newer; nothing here is imported by them.
"""

CODEC = """
import json

def encode(value, depth=0):
    if depth > 100:
        raise TypeError("nested too deeply")
    kind = type(value)
    if value is None or kind in (bool, int, float, str):
        return value
    if kind in (list, tuple, set, frozenset):
        return [kind.__name__, [encode(one, depth + 1) for one in value]]
    if kind is dict:
        return ["dict", [[encode(k, depth + 1), encode(v, depth + 1)] for k, v in value.items()]]
    if kind in (bytes, bytearray):
        return [kind.__name__, value.hex()]
    if kind is complex:
        return ["complex", value.real, value.imag]
    for base in (bool, int, float, str, list, tuple, dict, set):  # subclasses: Counter, namedtuple, IntEnum
        if isinstance(value, base):
            return encode(base(value), depth + 1)
    raise TypeError("a value of type %s is no literal" % kind.__name__)

def decode(value):
    if not isinstance(value, list):
        return value
    kind, content = value[0], value[1]
    if kind in ("list", "tuple", "set", "frozenset"):
        made = [decode(one) for one in content]
        return made if kind == "list" else {"tuple": tuple, "set": set, "frozenset": frozenset}[kind](made)
    if kind == "dict":
        return {decode(k): decode(v) for k, v in content}
    if kind in ("bytes", "bytearray"):
        return {"bytes": bytes, "bytearray": bytearray}[kind].fromhex(content)
    if kind == "complex":
        return complex(content, value[2])
    raise ValueError("no value of this kind")
"""

DRIVER = (
    CODEC
    + """
import os
import sys

def main():
    requests = os.fdopen(int(sys.argv[1]), "r", encoding="utf-8", errors="surrogatepass", newline="\\n")
    replies = os.fdopen(int(sys.argv[2]), "w", encoding="utf-8", errors="surrogatepass", newline="\\n")
    dumps, loads = json.dumps, json.loads

    def say(**reply):
        replies.write(dumps(reply) + "\\n")
        replies.flush()

    def said(error):
        return {"error": type(error).__name__, "message": str(error)[:500]}

    space = {"__name__": "candidate", "__builtins__": __builtins__}
    try:
        with open("/work/program.py", encoding="utf-8", errors="surrogatepass") as file:
            exec(compile(file.read(), "program.py", "exec"), space)
    except BaseException as error:
        say(**said(error))
        return
    say(loaded=True)
    for line in requests:
        request = loads(line)
        try:
            if request["call"] not in space:
                raise NameError("the program defines no %s" % request["call"])
            arguments, keywords = decode(request["arguments"]), decode(request["keywords"])
            reply = {"value": encode(space[request["call"]](*arguments, **keywords))}
        except BaseException as error:
            reply = said(error)
        say(**reply)

main()
"""
)

EXAMINER = (
    CODEC
    + '''
import ast
import builtins
import math
import os
import sys

LINE = 1 << 20

class CandidateError(Exception):
    """What the candidate raised, if it is no built-in exception; or that it gives no answer."""

class Candidate:
    def __init__(self, requests, replies):
        self.requests, self.replies, self.failure, self.calls = requests, replies, None, 0
        self.started = False

    def receive(self):
        line = self.replies.readline(LINE)
        if not line.endswith(b"\\n"):
            self.failure = "it answered more than %d bytes" % LINE if line else "it ended without an answer"
            raise CandidateError(self.failure)
        try:
            reply = json.loads(line)
            if "error" in reply:
                return reply, None
            return reply, decode(reply.get("value"))
        except Exception as error:
            self.failure = "its answer cannot be read (%s)" % type(error).__name__
            raise CandidateError(self.failure) from None

    def call(self, name, arguments, keywords):
        self.calls += 1
        if self.failure is not None:
            raise CandidateError(self.failure)
        if not self.started:
            self.started = True
            reply, _ = self.receive()
            if "error" in reply:
                self.failure = "the program does not load: %s: %s" % (reply["error"], reply.get("message"))
                raise CandidateError(self.failure)
        text = json.dumps({"call": name, "arguments": encode(arguments), "keywords": encode(keywords)})
        try:
            self.requests.write(text.encode("utf-8", "surrogatepass") + b"\\n")
            self.requests.flush()
        except OSError:
            self.failure = "it ended without an answer"
            raise CandidateError(self.failure) from None
        reply, value = self.receive()
        if "error" in reply:
            kind = getattr(builtins, str(reply["error"]), None)
            if isinstance(kind, type) and issubclass(kind, Exception):
                try:
                    error = kind(str(reply.get("message")))
                except Exception:
                    error = None
                if error is not None:
                    error.from_candidate = True
                    raise error
            raise CandidateError("%s: %s" % (reply["error"], reply.get("message")))
        return value

def function(candidate, name):
    def call(*arguments, **keywords):
        return candidate.call(name, arguments, keywords)
    call.__name__ = str(name)
    return call

def same(a, b, tolerance):
    if isinstance(a, (list, tuple)) and isinstance(b, (list, tuple)):
        return len(a) == len(b) and all(same(x, y, tolerance) for x, y in zip(a, b))
    if isinstance(a, dict) and isinstance(b, dict):
        return a.keys() == b.keys() and all(same(a[key], b[key], tolerance) for key in a)
    if isinstance(a, bool) or isinstance(b, bool):
        return a is b
    if isinstance(a, (int, float)) and isinstance(b, (int, float)):
        is_float = isinstance(a, float) or isinstance(b, float)
        return a == b or (is_float and math.isclose(a, b, rel_tol=tolerance))
    return type(a) is type(b) and a == b

def free_names(tree):
    bound, loaded = set(), set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Name):
            (loaded if isinstance(node.ctx, ast.Load) else bound).add(node.id)
        elif isinstance(node, (ast.FunctionDef, ast.ClassDef, ast.AsyncFunctionDef)):
            bound.add(node.name)
        elif isinstance(node, ast.arg):
            bound.add(node.arg)
        elif isinstance(node, ast.alias):
            bound.add((node.asname or node.name).split(".")[0])
        elif isinstance(node, ast.ExceptHandler) and node.name:
            bound.add(node.name)
    return {name for name in loaded - bound if not hasattr(builtins, name)}

def main():
    with open("/work/tests.json", encoding="utf-8") as file:
        given = json.load(file)
    verdicts = os.fdopen(os.dup(1), "w", encoding="utf-8", errors="backslashreplace")
    null = os.open("/dev/null", os.O_WRONLY)
    os.dup2(null, 1)
    candidate = Candidate(os.fdopen(int(sys.argv[1]), "wb"), os.fdopen(int(sys.argv[2]), "rb"))

    def verdict(**fields):
        verdicts.write(json.dumps(fields) + "\\n")
        verdicts.flush()

    for number, test in enumerate(given["tests"]):
        before, why = candidate.calls, None
        try:
            if isinstance(test, str):
                tree = ast.parse(test)
                space = {name: function(candidate, name) for name in free_names(tree)}
                space["__name__"] = "tests"
                exec(compile(tree, "test %d" % number, "exec"), space)
            else:
                value = candidate.call(test["call"], test.get("args", []), test.get("kwargs", {}))
                if not same(value, test["returns"], given["tolerance"]):
                    why = "returned another value"
        except AssertionError as error:
            why = "assertion failed"
        except BaseException as error:
            why = ("raised %s: %s" % (type(error).__name__, error))[:300]
        verdict(test=number, passed=why is None, why=why, calls=candidate.calls - before)
        if why is not None and given["stop"]:
            break
    verdict(done=True)

main()
'''
)
