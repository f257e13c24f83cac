"""Links of the pages: do the files and headings that they name exist?"""

import os
import re

# Text of others, or made by programs in a folder of a build.
SKIPPED = ("shared", "third_party")


def pages(root):
    """The paths of all .md files, relative to root."""
    for folder, folders, files in os.walk(root):
        folders[:] = sorted(f for f in folders if not f.startswith((".", "bazel-"))
                            and not (folder == root and f in SKIPPED))
        for name in sorted(files):
            if name.endswith(".md"):
                yield os.path.relpath(os.path.join(folder, name), root)


def prose(text):
    """The text without code, in which no link is one."""
    text = re.sub(r"(?ms)^[ ]*```.*?^[ ]*```", "", text)
    return re.sub(r"(`+)(?!`).*?(?<!`)\1(?!`)", "", text)


def anchor(title):
    """GitHub's name of a heading."""
    title = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", title.strip().replace("`", ""))
    return re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-")


def anchors(text):
    """The names of all headings; of equal ones with -1, -2, ..."""
    found = set()
    for title in re.findall(r"(?m)^#+ (.*)$", re.sub(r"(?ms)^```.*?^```", "", text)):
        name, count = anchor(title), 0
        while (name if not count else "%s-%d" % (name, count)) in found:
            count += 1
        found.add(name if not count else "%s-%d" % (name, count))
    return found


def read(path):
    with open(path, encoding="utf-8") as file:
        return file.read()


def broken(root):
    """Yields a line for each link that leads nowhere."""
    for page in pages(root):
        text = prose(read(os.path.join(root, page)))
        links = re.findall(r"\]\(([^)\s]+)[^)]*\)", text)
        links += re.findall(r"""<(?:img|source|a)\s[^>]*?(?:src|srcset|href)=["']([^"']+)""", text)
        for link in links:
            if re.match(r"[a-z]+:", link):
                continue
            target, _, name = link.partition("#")
            path = os.path.normpath(os.path.join(os.path.dirname(page), target)) \
                if target else page
            full = os.path.join(root, path)
            if path.startswith("..") or not os.path.exists(full):
                yield "%s: %s: there is no %s" % (page, link, path)
            elif name and path.endswith(".md") and name not in anchors(read(full)):
                yield "%s: %s: %s has no such heading" % (page, link, path)
