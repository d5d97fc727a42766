"""The documentation site: pages from docs/ and other files, the reference of params.yaml, equations as MathML."""
