// Validates AsyncAPI documents with the official parser and its parser of Avro schemas.
// Reads a JSON list of documents from stdin, and prints the list of each one's problems.
import { readFileSync } from "node:fs";
import { AvroSchemaParser } from "@asyncapi/avro-schema-parser";
import { Parser } from "@asyncapi/parser";

const LATEST = "asyncapi-latest-version"; // More tools read 3.0.0 than the newest version.
const ERROR = 0;
const WARNING = 1;
const found = [];
for (const text of JSON.parse(readFileSync(0, "utf8"))) {
  const parser = new Parser({ schemaParsers: [AvroSchemaParser()] });
  const { document, diagnostics } = await parser.parse(JSON.stringify(text));
  const problems = diagnostics
    .filter((one) => one.severity === ERROR || one.severity === WARNING)
    .filter((one) => one.code !== LATEST)
    .map((one) => `${one.path.join(".")}: ${one.message}`);
  found.push(document === undefined ? ["the document was not parsed", ...problems] : problems);
}
console.log(JSON.stringify(found));
