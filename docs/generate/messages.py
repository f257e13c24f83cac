"""What the code says to users: every message of the C++ sources, as a pattern.

A message is the text of a maker: absl::<Code>Error(...), absl::Status(...),
TORCH_CHECK*(...), C10_THROW_ERROR(...), TESSERA_LOG*(...) << ... . Its literals
stand as they are written, whatever is put between them as "…":

    absl::StrCat("rank ", r, " has come twice", left ? ", or the file is left" : "")
    ->  rank … has come twice[, or the file is left]

A piece is prose (two words at least) in any other expression: what a function
passes on to a maker of another one. Nothing a user can see is in neither list, so
a page made of both is complete.

The sources are read by a lexer of their own: comments, strings (also raw and
adjacent ones), characters and preprocessor lines are told apart as a compiler does.
"""

import collections
import functools
import os
import re

# Rooms of tools/layers.txt whose messages reach no user.
OTHERS = ("testing", "tests", "benchmarks", "bundle", "dist")
HOLE = "…"

# kind: a Status code, "log WARNING", "exception" or "piece".
Message = collections.namedtuple("Message", "text kind path")
Token = collections.namedtuple("Token", "kind text")

TOKEN = re.compile(
    r"""(?P<space>\s+|//[^\n]*|/\*.*?\*/)
      | (?P<raw>(?:u8|[uUL])?R"(?P<delimiter>[^(\s]*)\((?P<rawtext>.*?)\)(?P=delimiter)")
      | (?P<string>(?:u8|[uUL])?"(?:[^"\\\n]|\\.)*")
      | (?P<char>'(?:[^'\\\n]|\\.)+')
      | (?P<number>\.?\d(?:'?[\w.]|(?<=[eEpP])[+-])*)
      | (?P<name>[A-Za-z_]\w*)
      | (?P<sign>::|<<|->|.)""",
    re.VERBOSE | re.DOTALL)
ESCAPES = {"n": "\n", "t": "\t", "0": "\0", "r": "\r"}
STATUS_MAKER = re.compile(r"^([A-Z][A-Za-z]*)Error$")
OPEN, CLOSE = "([{", ")]}"


def unescape(literal):
    """The characters of a string literal, quotes left out."""
    body = literal[literal.index('"') + 1:-1]
    return re.sub(r"\\(x[0-9a-fA-F]+|.)",
                  lambda m: ESCAPES.get(m[1], m[1] if len(m[1]) == 1 else "?"),
                  body, flags=re.DOTALL)


def lex(source):
    """Yields the tokens of C++ text; adjacent strings are one token."""
    # Directives hold no messages except in macros, whose users are read anyway.
    source = re.sub(r"(?m)^[ \t]*#[ \t]*include[^\n]*", "", source)
    source = re.sub(r"(?m)^([ \t]*)#", r"\1", source).replace("\\\n", "\n")
    pending = None
    for match in TOKEN.finditer(source):
        kind = match.lastgroup
        if match["space"] is not None:
            continue
        if match["raw"] is not None:
            kind, text = "string", match["rawtext"]
        elif match["string"] is not None:
            kind, text = "string", unescape(match["string"])
        else:
            text = match[0]
        if kind == "string":
            pending = (pending or "") + text
            continue
        if pending is not None:
            yield Token("string", pending)
            pending = None
        yield Token(kind, text)
    if pending is not None:
        yield Token("string", pending)


def closing(tokens, at):
    """The index of the bracket that closes the one at `at`."""
    depth = 0
    for i in range(at, len(tokens)):
        if tokens[i].kind == "sign":
            depth += tokens[i].text in OPEN
            depth -= tokens[i].text in CLOSE
            if depth == 0:
                return i
    raise ValueError("a bracket is not closed")


def split(tokens, sign):
    """The parts of a token list between top-level occurrences of a sign."""
    parts, depth = [[]], 0
    for token in tokens:
        if token.kind == "sign":
            depth += token.text in OPEN
            depth -= token.text in CLOSE
            if depth == 0 and token.text == sign:
                parts.append([])
                continue
        parts[-1].append(token)
    return parts


def choose(texts):
    """One of several texts: [a|b], [a] where the other is nothing."""
    kept = list(dict.fromkeys(text for text in texts if text))
    if len(kept) == 1 and len(kept) == len(set(texts)):
        return kept[0]
    return "[" + "|".join(kept) + "]" if kept else ""


def text_of(tokens, joint=""):
    """The pattern of one expression; `joint` is put between arguments."""
    parts = [part for part in split(tokens, ",") if part]
    if len(parts) > 1:
        return join([text_of(part) for part in parts], joint)
    parts = split(tokens, "?")
    if len(parts) > 1:
        rest = [t for part in parts[1:] for t in [Token("sign", "?"), *part]][1:]
        return choose(branches(rest))
    for sign in ("<<", "+", "="):
        parts = split(tokens, sign)
        if len(parts) > 1:
            return "".join(text_of(part) for part in parts if part)
    if len(tokens) == 1 and tokens[0].kind == "string":
        return tokens[0].text
    if not any(token.kind == "string" for token in tokens):
        return HOLE
    for i, token in enumerate(tokens):  # a call or parentheses: what is in them
        if token.kind == "sign" and token.text in OPEN:
            end = closing(tokens, i)
            texts = [text_of_call(tokens[i - 1].text if i else "",
                                  tokens[i + 1:end])]
            rest = tokens[end + 1:]
            if any(t.kind == "string" for t in rest):
                texts.append(text_of(rest))
            return "".join(texts) or HOLE
    return "".join(t.text if t.kind == "string" else "" for t in tokens) or HOLE


def text_of_call(called, arguments):
    """What a function makes of its arguments."""
    if not any(t.kind == "string" for t in arguments):
        return ""
    if called == "StrJoin":  # the separator tells nothing
        return text_of([t for t in arguments if t.kind != "string"])
    if called in ("StrFormat", "printf", "fprintf", "StrAppendFormat"):
        form = next(part for part in split(arguments, ",")
                    if any(t.kind == "string" for t in part))
        return re.sub(r"%[-+ #0]*[\d*]*(?:\.[\d*]+)?[a-z]+", HOLE, text_of(form))
    # Functions of our own have arguments that are texts of their own.
    return text_of(arguments, "" if called in ("", "StrCat", "StrAppend") else ": ")


def join(texts, joint):
    """The texts of arguments in a row; the joint follows a key, such as aio.use_gds."""
    joined = ""
    for text in texts:
        if joint and re.search(r"(^|[\w.\]])$", joined) and re.match(r"[\w'\"]", text) \
                and re.fullmatch(r"[\w.%s\[\]]+" % HOLE, joined):
            joined += joint
        joined += text
    return joined


def branches(tokens):
    """The texts of what follows a `?`: its own and that after its `:`."""
    depth = nested = 0
    for i, token in enumerate(tokens):
        if token.kind != "sign":
            continue
        depth += token.text in OPEN
        depth -= token.text in CLOSE
        if depth:
            continue
        if token.text == "?":
            nested += 1
        elif token.text == ":" and nested:
            nested -= 1
        elif token.text == ":":
            return [text_of(tokens[:i]), text_of(tokens[i + 1:])]
    return [text_of(tokens)]


def tidy(text):
    """One line; what is put in between is one hole."""
    text = re.sub(r"\s*\n\s*", " ", text)
    return re.sub("%s(?:%s)+" % (HOLE, HOLE), HOLE, text).strip()


def is_prose(text):
    """Two words at least."""
    return re.search(r"[A-Za-z]{2,}[,;:]? [A-Za-z]{2,}", text) is not None


def maker_at(tokens, i):
    """(kind, begin, end) of the message that is made at token i, or None."""
    token = tokens[i]
    if token.kind != "name" or i + 1 >= len(tokens) or tokens[i + 1].text != "(":
        return None
    qualified = i >= 2 and tokens[i - 1].text == "::" and tokens[i - 2].text == "absl"
    match = STATUS_MAKER.match(token.text)
    end = closing(tokens, i + 1)
    if qualified and match:
        return match[1], i + 2, end
    if qualified and token.text == "Status":
        return "Status", i + 2, end
    if token.text.startswith("TORCH_CHECK") or token.text == "C10_THROW_ERROR":
        return "exception", i + 2, end
    if token.text in ("TESSERA_LOG", "TESSERA_LOG_RANK0"):
        stop, depth = end + 1, 0
        while stop < len(tokens) and not (depth == 0 and tokens[stop].text == ";"
                                          and tokens[stop].kind == "sign"):
            if tokens[stop].kind == "sign":
                depth += tokens[stop].text in OPEN
                depth -= tokens[stop].text in CLOSE
            stop += 1
        return "log " + tokens[i + 2].text, end + 1, stop
    return None


def text_of_maker(kind, tokens):
    if kind in ("Status", "exception"):  # the code, the condition
        tokens = [t for part in split(tokens, ",")[1:]
                  for t in [Token("sign", ","), *part]][1:]
    return tidy(text_of(tokens))


@functools.lru_cache(maxsize=None)
def tokens_of(path):
    """The tokens of a file, which several readers want."""
    with open(path, encoding="utf-8") as file:
        return tuple(lex(file.read()))


def messages_of(tokens, path):
    """Yields the messages and pieces of the tokens of one C++ file."""
    taken = [False] * len(tokens)
    for i in range(len(tokens)):
        maker = None if taken[i] else maker_at(tokens, i)
        if maker is None:
            continue
        kind, begin, end = maker
        # A maker within (in a lambda, or Annotate(absl::...)) speaks for itself.
        text = text_of_maker(kind, tokens[begin:end])
        for j in range(begin, end):
            taken[j] = True
        if re.search("[A-Za-z]", text):
            yield Message(text, kind, path)
    for part in pieces(tokens, taken):
        text = re.sub(r"^%s(?! )|(?<! )%s$" % (HOLE, HOLE), "", tidy(text_of(part)))
        if is_prose(text):
            yield Message(text, "piece", path)


def pieces(tokens, taken):
    """The expressions that hold strings outside of all makers."""
    part = []
    for i, token in enumerate(tokens):
        if taken[i] or (token.kind == "sign" and token.text in ";{}"):
            if any(t.kind == "string" for t in part):
                yield balanced(part)
            part = []
        else:
            part.append(token)
    if any(t.kind == "string" for t in part):
        yield balanced(part)


def balanced(part):
    """Without the brackets that open or close outside of the part."""
    opened, drop = [], set()
    for i, token in enumerate(part):
        if token.kind == "sign" and token.text in OPEN:
            opened.append(i)
        elif token.kind == "sign" and token.text in CLOSE:
            if opened:
                opened.pop()
            else:
                drop.add(i)
    drop.update(opened)
    return [Token("sign", ",") if i in drop else t for i, t in enumerate(part)]


def rooms(root):
    """The top folders of what the library and its programs consist of."""
    with open(os.path.join(root, "tools/layers.txt"), encoding="utf-8") as file:
        tops = [re.match(r"(\w+)[\w/]*:", line) for line in file]
    return [top for top in dict.fromkeys(m[1] for m in tops if m) if top not in OTHERS]


def sources(root):
    """The paths of the C++ files that are not of tests, relative to root."""
    for room in rooms(root):
        for folder, folders, files in os.walk(os.path.join(root, room)):
            folders[:] = sorted(f for f in folders if f != "testdata")
            for name in sorted(files):
                if name.endswith((".cc", ".h", ".cu", ".cuh")) and not re.search(
                        r"_(test|fuzz)\.|^test_", name):
                    yield os.path.relpath(os.path.join(folder, name), root)


def all_messages(root):
    found = []
    for path in sources(root):
        found.extend(messages_of(tokens_of(os.path.join(root, path)), path))
    return list(dict.fromkeys(found))


if __name__ == "__main__":
    import sys
    for message in all_messages(sys.argv[1] if len(sys.argv) > 1 else "."):
        print("%s\t%s\t%s" % (message.path, message.kind, message.text))
