"""Writes a JSON schema for each kind: `schemas.py OPENAPI FOLDER` from an OpenAPI document (v2), or, as a module, from a
CustomResourceDefinition. Unknown keys are refused, as the API server refuses them in strict mode."""

import copy
import json
import pathlib
import sys


def name(group, version, kind):
    """As kubeconform's template `{{ .ResourceKind }}-{{ .Group }}-{{ .ResourceAPIVersion }}` asks for it."""
    return f"{kind.lower()}-{group}-{version}.json"


def strict(schema):
    """The schema with unknown keys refused, and with what OpenAPI says in words of its own said in JSON schema's."""
    if isinstance(schema, list):
        return [strict(one) for one in schema]
    if not isinstance(schema, dict):
        return schema
    schema = {key: strict(value) for key, value in schema.items()}
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
    """(file name, schema) of each kind, all with the definitions that they refer to beside them."""
    for schema in document["definitions"].values():
        for kind in schema.get("x-kubernetes-group-version-kind", []):
            yield name(kind["group"], kind["version"], kind["kind"]), strict(schema)


def main(source, folder):
    folder = pathlib.Path(folder)
    folder.mkdir(parents=True)
    text = pathlib.Path(source).read_text().replace('"#/definitions/', '"_definitions.json#/definitions/')
    document = json.loads(text)
    (folder / "_definitions.json").write_text(json.dumps({"definitions": strict_each(document["definitions"])}))
    for file, schema in of_openapi(document):
        (folder / file).write_text(json.dumps(schema))


def strict_each(definitions):
    return {name: strict(schema) for name, schema in definitions.items()}


if __name__ == "__main__":
    main(*sys.argv[1:])
