#!/usr/bin/python3
"""What pages call by name exists.

  `Type::member`     a member of a class or struct of the public headers
  `tessera::Name`    a name in them
  `a.b.c`            a configuration key, if `a` is one of the first level; and
  `key`              alone, of a code fragment with quotes: `"key": value`
  [text](place)      a file of this tree beside the page, a heading of that page

usage: names_test.py SCHEMA PAGE... --keys PAGE... -- HEADER...

Of the pages behind --keys, which name what no header of users has, only the
configuration keys are looked up.
"""

import json
import pathlib
import re
import sys
import unittest

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent))
import mutant_report  # noqa: E402

SCHEMA = {}
PAGES = []
PAGES_OF_KEYS = []
HEADERS = []
# Keys for measurements and tests of the engine itself, which the schema leaves out
# (the option `internal` of config/reader/json_options.proto).
INTERNAL_KEYS = ('sharding.shard_alone',)

CODE = re.compile(r'(?<!`)`([^`\n]+)`(?!`)')
MEMBER = re.compile(r'^(?:tessera::)?([A-Z]\w*)::(\w+)$')
FREE = re.compile(r'^tessera::([A-Z]\w*)$')
LINK = re.compile(r'\]\(([^)\s]+)\)', re.S)


def class_bodies(text):
    """By name, what stands between the braces of classes and structs."""
    bodies = {}
    for found in re.finditer(
            r'\b(?:class|struct)\s+(?:\[\[\w+\]\]\s*)?(\w+)[^;{}()=]*\{', text):
        depth = 0
        for brace in re.finditer(r'[{}]', text[found.end() - 1:]):
            depth += 1 if brace.group() == '{' else -1
            if not depth:
                body = text[found.end():found.end() + brace.start()]
                bodies.setdefault(found.group(1), []).append(body)
                break
    return bodies


def without_comments(text):
    return re.sub(r'//[^\n]*', '', text)


def children(schema):
    """The keys of a section, of lists of sections too."""
    found = dict(schema.get('properties', {}))
    for part in schema.get('anyOf', []) + [schema.get('items', {})]:
        found.update(children(part) if part else {})
    return found


def has_key(path):
    section = SCHEMA
    for word in path:
        section = children(section).get(word)
        if section is None:
            return False
    return True


def all_keys(schema):
    for key, section in children(schema).items():
        yield key
        yield from all_keys(section)


def anchors(page):
    """As GitHub makes them of headings."""
    for heading in re.findall(r'^#+ +(.*)$', page.read_text(), re.M):
        words = re.sub(r'[^\w\- ]', '', heading.lower())
        yield words.replace(' ', '-')


class NamesTest(unittest.TestCase):

    @classmethod
    def setUpClass(cls):
        texts = [without_comments(h.read_text()) for h in HEADERS]
        cls.words = set(re.findall(r'\w+', '\n'.join(texts)))
        cls.bodies = {}
        for text in texts:
            for name, bodies in class_bodies(text).items():
                cls.bodies.setdefault(name, []).extend(bodies)
        cls.keys = set(all_keys(SCHEMA))

    def setUp(self):
        self.looked_up = 0

    def fault_of(self, code):
        """Why `code` is wrong; None if it is right, or no name."""
        member = MEMBER.match(code)
        if member:
            self.looked_up += 1
            bodies = self.bodies.get(member.group(1))
            if not bodies:
                return 'no class ' + member.group(1)
            if member.group(2) not in re.findall(r'\w+', ' '.join(bodies)):
                return 'no such member'
        free = FREE.match(code)
        if free:
            self.looked_up += 1
            if free.group(1) not in self.words:
                return 'in no public header'
        fault = self.fault_of_key(code)
        if fault:
            return fault
        for key in re.findall(r'"(\w+)":', code):
            self.looked_up += 1
            if key not in self.keys:
                return '"%s" is no configuration key' % key
        return None

    def fault_of_key(self, code):
        """Why `a.b.c` is wrong, if it looks like a configuration key."""
        path = code.split('.')
        if not re.match(r'^[a-z_0-9]+(\.[a-zA-Z_0-9]+)+$', code) or code in INTERNAL_KEYS:
            return None
        # A file's name, such as `scheduler.proto`, is none.
        if path[0] not in children(SCHEMA) or {'h', 'cc', 'proto', 'json', 'md'} & set(path):
            return None
        self.looked_up += 1
        return None if has_key(path) else 'no configuration key'

    def test_keys_of_all_pages(self):
        for page in PAGES_OF_KEYS:
            text = re.sub(r'^```.*?^```', '', page.read_text(), flags=re.M | re.S)
            for code in CODE.findall(text):
                with self.subTest(page=page.name, code=code):
                    self.assertIsNone(self.fault_of_key(code))
        self.assertGreater(self.looked_up, 80)

    def test_names(self):
        for page in PAGES:
            text = re.sub(r'^```.*?^```', '', page.read_text(), flags=re.M | re.S)
            for code in CODE.findall(text):
                with self.subTest(page=page.name, code=code):
                    self.assertIsNone(self.fault_of(code))
        self.assertGreater(self.looked_up, 100)

    def test_links_to_pages(self):
        for page in PAGES:
            for link in LINK.findall(page.read_text()):
                place, _, anchor = link.partition('#')
                other = page.parent / place if place else page
                # Of files that are not pages this test has no copy.
                if '://' in link or (other.suffix != '.md'):
                    continue
                with self.subTest(page=page.name, link=link):
                    self.assertTrue(other.exists())
                    if anchor:
                        self.assertIn(anchor, list(anchors(other)))

    def test_what_is_not_there_is_found(self):
        for code in ('Engine::Backwards', 'NoEngine::Step', 'tessera::Engines',
                     'zero_optimization.stages', 'sharding.offload.check', 'sharding.units',
                     '"stagess": 3'):
            self.assertIsNotNone(self.fault_of(code), code)
        for code in ('Engine::Backward', 'SaveOptions::async', 'tessera::Use',
                     'zero_optimization.stage', '"stage": 3', 'a.b', '--world'):
            self.assertIsNone(self.fault_of(code), code)


if __name__ == '__main__':
    _, schema, *rest = sys.argv
    SCHEMA.update(json.loads(pathlib.Path(schema).read_text()))
    keys, split = rest.index('--keys'), rest.index('--')
    PAGES.extend(pathlib.Path(path) for path in rest[:keys])
    PAGES_OF_KEYS.extend(pathlib.Path(path) for path in rest[keys + 1:split])
    HEADERS.extend(pathlib.Path(path) for path in rest[split + 1:])
    sys.exit(mutant_report.main())
