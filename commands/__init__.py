"""Commands of the command line, one module each, whose function `add` adds the parser.

- `cluster`: `weightcast up`, `down` and `update`
- `demo`: `weightcast demo`
- `gateway`: `weightcast gateway`
- `inspect`: `weightcast inspect`
- `load`: `weightcast load`
- `options`: options and output that several commands share
- `pairs`: `weightcast pairs`, `delete`, `leave` and `join`
- `plan`: `weightcast plan`
- `status`: `weightcast status`
"""
