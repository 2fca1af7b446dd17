// Checks Kubernetes resources against their schemas. Reads [{ file, resource }] as JSON from standard input; prints what is wrong and
// ends with 1. A validator finds values that are not allowed, the type checker keys that no schema has.
import { readFileSync, writeFileSync } from "node:fs";
import ts from "typescript";

// Where a resource's class is.
const packages = { "networking.istio.io": "@kubernetes-models/istio", "gateway.envoyproxy.io": "@kubernetes-models/envoy-gateway" };

let wrong = 0;
function complain(text) {
  wrong += 1;
  console.error(text);
}

const programs = new Map();
for (const [number, { file, resource }] of JSON.parse(readFileSync(0, "utf8")).entries()) {
  const { apiVersion, kind, ...fields } = resource;
  const name = `${file}: ${kind} ${resource.metadata?.name}`;
  const group = apiVersion.includes("/") ? apiVersion.split("/")[0] : "";
  const path = `${packages[group] ?? "kubernetes-models"}/${apiVersion}/${kind}`;
  try {
    const Kind = (await import(path))[kind];
    new Kind(fields).validate();
  } catch (error) {
    complain(`${name}: ${error.message}`);
    continue;
  }
  const program = `resource-${number}.ts`;
  writeFileSync(program, `import { ${kind} } from "${path}";\nnew ${kind}(${JSON.stringify(fields)});\n`);
  programs.set(program, name);
}

const options = { noEmit: true, strict: true, skipLibCheck: true, module: ts.ModuleKind.NodeNext, target: ts.ScriptTarget.ES2022 };
for (const { file, messageText } of ts.getPreEmitDiagnostics(ts.createProgram([...programs.keys()], options))) {
  complain(`${programs.get(file?.fileName) ?? file?.fileName}: ${ts.flattenDiagnosticMessageText(messageText, "\n")}`);
}
process.exit(wrong ? 1 : 0);
