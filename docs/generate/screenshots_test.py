#!/usr/bin/python3
"""docs/generate/screenshots with stand-ins for Chromium: nothing is trained."""
import importlib.machinery
import importlib.util
import os
import subprocess
import sys
import tempfile
import unittest

HERE = os.path.dirname(os.path.abspath(__file__))
SCRIPT = os.path.join(HERE, 'screenshots')
# Writes what it was called with behind the head of a PNG.
BROWSER = r'''#!/usr/bin/python3
import sys
out, = [word[13:] for word in sys.argv if word.startswith('--screenshot=')]
with open(out, 'wb') as file:
    file.write(HEAD + '\n'.join(sys.argv[1:]).encode())
'''


def load():
    sys.dont_write_bytecode = True
    loader = importlib.machinery.SourceFileLoader('screenshots', SCRIPT)
    module = importlib.util.module_from_spec(
        importlib.util.spec_from_loader('screenshots', loader))
    loader.exec_module(module)
    return module


screenshots = load()


class ScreenshotsTest(unittest.TestCase):

    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = folder.name

    def browser(self, text):
        path = self.folder + '/browser'
        with open(path, 'w', encoding='utf-8') as file:
            file.write(text)
        os.chmod(path, 0o755)
        return path

    def test_says_what_is_missing_before_anything_is_built(self):
        done = subprocess.run([sys.executable, SCRIPT], check=False, text=True,
                              capture_output=True, env={'PATH': self.folder})
        self.assertEqual(done.returncode, 1)
        self.assertIn('no Chromium', done.stderr)
        self.assertIn('apt-get install chromium', done.stderr)
        with self.assertRaisesRegex(screenshots.Missing, 'no /none.* --browser'):
            screenshots.find_browser('/none')

    def test_a_picture_of_a_page(self):
        browser = self.browser(BROWSER.replace('HEAD', repr(screenshots.PNG)))
        self.assertEqual(screenshots.find_browser(browser), browser)
        out = self.folder + '/a.png'
        # Without pngquant, to which this is no picture.
        path, os.environ['PATH'] = os.environ['PATH'], '/none'
        try:
            screenshots.shoot(browser, self.folder + '/a.html', out, 640, 480)
        finally:
            os.environ['PATH'] = path
        with open(out, 'rb') as file:
            words = file.read()[len(screenshots.PNG):].decode().split('\n')
        for word in ('--headless=new', '--window-size=640,480',
                     'file://' + self.folder + '/a.html'):
            self.assertIn(word, words)

    def test_no_picture_is_an_error(self):
        for text, why in (('#!/bin/sh\n', 'no picture of a.html'),
                          (BROWSER.replace('HEAD', repr(b'GIF')),
                           'no PNG of a.html')):
            browser = self.browser(text)
            with self.assertRaisesRegex(screenshots.Missing, why):
                screenshots.shoot(browser, 'a.html', self.folder + '/b.png', 1, 1)

    def test_marks_become_pictures_once(self):
        text = 'a\n\n<!-- picture a.png: Two\nlines. -->\n<!-- picture b.png: B -->\n'
        placed = screenshots.place(text, 'docs/a.md', {'a.png': None})
        self.assertEqual(placed, 'a\n\n![Two lines.](images/a.png)\n'
                         '<!-- picture b.png: B -->\n')
        self.assertEqual(screenshots.place(placed, 'docs/a.md', {'a.png'}),
                         placed)
        self.assertIn('(docs/images/b.png)',
                      screenshots.place(text, 'README.md', {'b.png'}))

    def test_each_picture_has_a_place(self):
        root = os.path.dirname(os.path.realpath('WORKSPACE'))
        texts = []
        for page in screenshots.PAGES:
            with open(os.path.join(root, page), encoding='utf-8') as file:
                texts.append(file.read())
        for name in screenshots.PICTURES:
            self.assertTrue(any('picture %s: ' % name in text or
                                '](images/%s)' % name in text
                                for text in texts), name)


if __name__ == '__main__':
    unittest.main()
