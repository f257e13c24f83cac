#!/usr/bin/python3
"""Writes the schema_data.cc of the .proto files named: embed_schema.py OUT PROTO..."""

import subprocess
import sys
import tempfile


def main(out, protos):
    with tempfile.NamedTemporaryFile() as descriptors:
        subprocess.run(
            ["/usr/bin/protoc", "-I.", "-I/usr/include", "--include_imports",
             "--include_source_info",
             "--descriptor_set_out=" + descriptors.name] + protos, check=True)
        data = descriptors.read()
    lines = ["    " + ", ".join(str(b) for b in data[i:i + 20]) + ","
             for i in range(0, len(data), 20)]
    with open(out, "w") as source:
        source.write('#include "config/schema_data.h"\n\nnamespace tessera {\n\n'
                     "const unsigned char kSchemaData[] = {\n%s\n};\n"
                     "const int kSchemaSize = %d;\n\n}  // namespace tessera\n" %
                     ("\n".join(lines), len(data)))


main(sys.argv[1], sys.argv[2:])
