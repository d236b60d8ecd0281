"""Writes a JSON schema for each kind: `schemas.py OPENAPI FOLDER` from an OpenAPI document (v2), or, as a module, from a
CustomResourceDefinition. Unknown keys are refused, as the API server refuses them in strict mode."""

import copy
import json
import pathlib
import re
import sys


def name(group, version, kind):
    """As kubeconform's template `{{ .ResourceKind }}-{{ .Group }}-{{ .ResourceAPIVersion }}` asks for it. To it the core
    group is called `v1`."""
    return f"{kind.lower()}-{group or version}-{version}.json"


# Keys of a schema that hold schemas: by name, in a list, or one.
BY_NAME, LISTS, SINGLE = {"properties"}, {"allOf", "anyOf", "oneOf"}, {"items", "additionalProperties", "not"}


def strict(schema):
    """The schema with unknown keys refused, and with what OpenAPI says in words of its own said in JSON schema's."""
    if not isinstance(schema, dict):
        return schema
    schema = dict(schema)
    for key, inner in schema.items():
        if key in BY_NAME:
            schema[key] = {name: strict(one) for name, one in inner.items()}
        elif key in LISTS:
            schema[key] = [strict(one) for one in inner]
        elif key in SINGLE:
            schema[key] = strict(inner)
    if schema.pop("x-kubernetes-int-or-string", False) or schema.get("format") == "int-or-string":
        for key in ("format", "type", "anyOf"):
            schema.pop(key, None)
        return schema | {"type": ["integer", "string"]}
    if schema.pop("nullable", False) and "type" in schema:
        schema["type"] = [schema["type"], "null"]
    is_open = schema.pop("x-kubernetes-preserve-unknown-fields", False)
    if "properties" in schema and "additionalProperties" not in schema and not is_open:
        schema["additionalProperties"] = False
    return schema


def of_definition(definition):
    """(file name, schema) of each served version of a CustomResourceDefinition."""
    group, kind = definition["spec"]["group"], definition["spec"]["names"]["kind"]
    for version in definition["spec"]["versions"]:
        schema = copy.deepcopy(version["schema"]["openAPIV3Schema"])
        properties = schema["properties"]
        properties |= {"apiVersion": {"type": "string"}, "kind": {"type": "string"}}
        # What metadata may have is the API server's to say.
        properties["metadata"] = {"type": "object"}
        yield name(group, version["name"], kind), strict(schema)


def of_openapi(document):
    """(file name, schema) of each kind, with all definitions that it refers to inside."""
    definitions = {name: strict(schema) for name, schema in document["definitions"].items()}
    for schema in definitions.values():
        for kind in schema.get("x-kubernetes-group-version-kind", []):
            inside, waiting = {}, [schema]
            while waiting:
                for wanted in referred(waiting.pop()) - inside.keys():
                    inside[wanted] = definitions[wanted]
                    waiting.append(definitions[wanted])
            yield name(kind["group"], kind["version"], kind["kind"]), schema | {"definitions": inside}


def referred(schema):
    """Names of the definitions that the schema itself refers to."""
    return set(re.findall(r'"#/definitions/([^"]+)"', json.dumps(schema)))


def main(source, folder):
    folder = pathlib.Path(folder)
    folder.mkdir(parents=True)
    for file, schema in of_openapi(json.loads(pathlib.Path(source).read_text())):
        (folder / file).write_text(json.dumps(schema))


if __name__ == "__main__":
    main(*sys.argv[1:])
