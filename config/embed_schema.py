#!/usr/bin/python3
"""Writes the schema_data.cc of config/config.proto: embed_schema.py OUT PROTO

PROTO is that file's path, which says where imports are found: here ., and
external/tessera where another workspace builds it.
"""

import os
import subprocess
import sys
import tempfile


def main(out, proto):
    root = os.path.dirname(os.path.dirname(proto)) or "."
    with tempfile.NamedTemporaryFile() as descriptors:
        subprocess.run(
            ["/usr/bin/protoc", "-I" + root, "-I/usr/include", "--include_imports",
             "--include_source_info",
             "--descriptor_set_out=" + descriptors.name, proto], check=True)
        data = descriptors.read()
    lines = ["    " + ", ".join(str(b) for b in data[i:i + 20]) + ","
             for i in range(0, len(data), 20)]
    with open(out, "w") as source:
        source.write('#include "config/schema_data.h"\n\nnamespace tessera {\n\n'
                     "const unsigned char kSchemaData[] = {\n%s\n};\n"
                     "const int kSchemaSize = %d;\n\n}  // namespace tessera\n" %
                     ("\n".join(lines), len(data)))


main(sys.argv[1], sys.argv[2])
