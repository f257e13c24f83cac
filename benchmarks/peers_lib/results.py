"""Tables of results, and the file of each kind of machine that keeps them.

A row's part of the file stands between two comments, so that a newer run of the
row takes its place; the turns themselves are in a JSON file beside it.
"""
import json
import os
import re
import statistics

import rows

ISAS = (('amx_tile', 'amx'), ('avx512f', 'avx512'), ('avx2', 'avx2'))
HEAD = ('ours', 'against', 'measured', 'goal', 'median', 'interval', '',
        'ours, median (least)', 'theirs')


def machine(cpuinfo='/proc/cpuinfo'):
    """What kind of machine this is, in words."""
    with open(cpuinfo, encoding='utf-8') as file:
        text = file.read()

    def field(name):
        found = re.search(rf'^{name}\s*: (.*)$', text, re.M)
        return found.group(1).strip() if found else 'unknown'
    flags = field('flags').split()
    isa = next((name for flag, name in ISAS if flag in flags), 'x86-64')
    count = len(re.findall(r'^processor\s*:', text, re.M))
    return (f'{field("model name")} (family {field("cpu family")}, model '
            f'{field("model")}), {count} CPUs, {isa}')


def slug(words):
    return re.sub(r'[^a-z0-9]+', '-', words.lower()).strip('-')


def number(value):
    return f'{value:.3f}' if abs(value) < 10 else f'{value:.1f}'


def cells(line):
    unit = 'MB' if line.goal.what in ('memory', 'bytes') else 'ms'
    ratio = line.ratio

    def of(values):
        return f'{statistics.median(values):.1f} ({min(values):.1f}) {unit}'
    return (rows.TITLES.get(line.goal.ours, line.goal.ours),
            rows.TITLES.get(line.goal.against, line.goal.against),
            line.goal.what, ratio.goal, number(ratio.median),
            f'{number(ratio.low)} to {number(ratio.high)}',
            ratio.verdict, of(line.ours), of(line.theirs))


def table(result):
    """In Markdown."""
    lines = [f'### {result.row.name}: {result.row.title}', '']
    if result.failed:
        lines += ['**FAILED**: see below; no speed counts.', '']
    if result.lines:
        lines += ['| ' + ' | '.join(HEAD) + ' |', '|' + '---|' * len(HEAD)]
        lines += ['| ' + ' | '.join(cells(line)) + ' |' for line in result.lines]
        lines.append('')
    lines += [f'- {note}' for note in result.notes]
    return '\n'.join(lines).rstrip() + '\n'


def marks(name):
    return f'<!-- row {name} -->', f'<!-- end of row {name} -->'


def with_row(text, name, part):
    """The text with `part` as that row's; rows stay in their order."""
    begin, end = marks(name)
    part = f'{begin}\n{part}{end}\n'
    if begin in text:
        before, rest = text.split(begin, 1)
        return before + part + rest.split(end + '\n', 1)[1]
    later = [at for other in re.findall(r'<!-- row (\w+) -->', text)
             if other > name for at in [text.index(marks(other)[0])]]
    at = min(later, default=len(text))
    before = text[:at].rstrip('\n') + '\n\n'
    return before + part + ('\n' + text[at:] if at < len(text) else '')


def keep(folder, words, results, stamp):
    """Writes both files; `stamp`: a line with date, commit and command."""
    os.makedirs(folder, exist_ok=True)
    path = os.path.join(folder, slug(words))
    text = (f'# Ours and theirs: {words}\n\nWritten by `benchmarks/peers`; a '
            'newer run of a row takes its place.\n')
    if os.path.exists(path + '.md'):
        text = read(path + '.md')
    raw = json.loads(read(path + '.json')) if os.path.exists(
        path + '.json') else {}
    for result in results:
        text = with_row(text, result.row.name, f'{table(result)}\n{stamp}\n')
        raw[result.row.name] = result.raw
    write(path + '.md', text)
    write_raw(path + '.json', raw)
    return path + '.md'


def write_raw(path, raw):
    """A row a line."""
    packed = '{\n' + ',\n'.join(f'{json.dumps(name)}: {json.dumps(raw[name])}'
                                for name in sorted(raw)) + '\n}\n'
    write(path, packed)


def read(path):
    with open(path, encoding='utf-8') as file:
        return file.read()


def write(path, text):
    with open(f'{path}.new', 'w', encoding='utf-8') as file:
        file.write(text)
    os.replace(f'{path}.new', path)
