// The samples of one task side by side, with their advantages or why they were left out.
import { html, useEffect, useState } from "../vendor/htm-preact.js";
import { getFile, usePoll } from "../lib/api.js";
import { bytes, clock, duration, number, reward, signed, words } from "../lib/format.js";
import { Action, Answer, EpisodeLink, Facts, Failure, Panel, Pill, VersionLink } from "../lib/parts.js";
import { go, link } from "../lib/route.js";
import { Table } from "../lib/table.js";
import { harmless, Text } from "../lib/text.js";

export const named = (counts) => Object.entries(counts ?? {}).map(([name, value]) => `${words(harmless(name))} ${number(value)}`).join(", ");

// A picture of an artifact that is fetched with the token, which an <img> can't send.
function Picture({ path, name }) {
  const [url, set] = useState(null);
  useEffect(() => {
    let [made, ended] = [null, false];
    getFile(path).then((found) => {
      made = found;
      if (ended) URL.revokeObjectURL(made);
      else set(made);
    }, () => {}); // The link below it says what is wrong.
    return () => {
      ended = true;
      if (made) URL.revokeObjectURL(made);
    };
  }, [path]);
  return html`<img src=${url} alt=${name} width="160" height="120" />`;
}

const KEPT_MS = 60_000; // A browser may begin to read a download a little later.

async function download(path, name) {
  const url = await getFile(path);
  Object.assign(document.createElement("a"), { href: url, download: name }).click();
  setTimeout(() => URL.revokeObjectURL(url), KEPT_MS);
}

// A download, with a picture if it is an image that a browser draws safely.
export function Artifact({ artifact }) {
  const [error, set] = useState("");
  const safe = artifact.url?.startsWith("/api/artifacts/");
  const name = harmless(artifact.name);
  if (!safe) return html`<span>${name} (${bytes(artifact.bytes)}, not stored)</span>`;
  const image = /^image\/(png|jpeg|gif|webp)$/.test(artifact.media);
  const save = (event) => {
    event.preventDefault();
    set("");
    download(artifact.url, name).catch((reason) => set(reason.message));
  };
  return html`<a class="artifact" href=${artifact.url} onClick=${save}>
    ${image ? html`<${Picture} path=${artifact.url} name=${name} />` : null}
    <span>${name} <span class="muted">${harmless(artifact.media)}, ${bytes(artifact.bytes)}</span></span>
    ${error ? html`<span role="alert">${harmless(error)}</span>` : null}</a>`;
}

const advantage = (row, policy) => row.advantages?.[policy]?.map(signed).join(" ") ?? "";

function columns(data) {
  const left = (row, policy) => policy.excluded?.[row.sample] ?? policy.batch?.dropped?.[row.sample];
  return [
    { key: "sample", name: "Sample", left: true, up: true, show: (row) => html`<${EpisodeLink} task=${data.task} sample=${row.sample} />` },
    { key: "state", name: "State", left: true, up: true, value: (row) => row.ending || row.state, show: (row) => html`<${Pill} tone=${row.failure ? "bad" : ""}>${row.ending || row.state}<//>` },
    { key: "reward", name: "Reward", show: (row) => reward(row.reward) },
    { key: "rewards", name: "Parts", left: true, value: (row) => named(row.rewards) },
    ...data.policies.map((policy) => ({
      key: `advantage-${policy.policy}`, name: data.policies.length > 1 ? `Advantage of ${harmless(policy.policy)}` : "Advantage",
      value: (row) => row.advantages?.[policy.policy]?.[0],
      show: (row) => left(row, policy) ? html`<${Pill} tone="warn">${left(row, policy)}<//>` : advantage(row, policy.policy) || "–",
    })),
    { key: "turns", name: "Turns" },
    { key: "tokens", name: "Tokens" },
    { key: "seconds", name: "Time", show: (row) => duration(row.seconds) },
    { key: "oldest_version", name: "Version" },
    { key: "attempts", name: "Attempts" },
    { key: "last_text", name: "Last text", left: true, up: true, show: (row) => row.failure ? html`<${Failure} failure=${row.failure} />` : harmless(row.last_text).slice(0, 160) },
  ];
}

function Verdict({ policy }) {
  const { batch } = policy;
  return html`<${Panel} title=${`Policy ${harmless(policy.policy)}`}><${Facts} items=${[
    ["Verdict", html`<${Pill}>${policy.verdict}<//>`],
    ["Reason", policy.reason ? words(policy.reason) : null],
    ["Estimator", policy.estimator],
    ["Mean reward", reward(policy.mean)],
    ["Deviation", number(policy.deviation)],
    ["Batch of version", batch ? html`<${VersionLink} policy=${policy.policy} version=${batch.version} />` : "not in a batch"],
    ["Trained on", batch ? batch.trained.join(", ") || "no sample" : null],
    ["Dropped from the batch", batch && Object.keys(batch.dropped).length ? Object.entries(batch.dropped).map(([sample, why]) => `${sample}: ${words(why)}`).join(", ") : null],
    ["Left out", Object.keys(policy.excluded).length ? Object.entries(policy.excluded).map(([sample, why]) => `${sample}: ${words(why)}`).join(", ") : null],
  ]} /><//>`;
}

export function GroupPage({ route }) {
  const task = Number(route.parts[0]);
  const poll = usePoll(`/api/groups/${encodeURIComponent(route.parts[0])}`, 4);
  return html`<${Answer} poll=${poll}>${(data) => html`
    <div class="bar-row"><${Pill}>${data.state}<//><span class="muted">${harmless(data.environment)} · ${harmless(data.item_id)} · ${words(data.purpose)}</span><span class="push"></span>
      <${Action} name="Run this task again" action="again" once body=${{ task }} question="Submit the same task with a new id?" onDone=${(answer) => answer.task !== undefined && go(link(["group", answer.task]))} />
      ${data.state === "ended" ? null : html`<${Action} name="Cancel" action="cancel" body=${{ task, reason: "from the dashboard" }} question=${`Cancel task ${task}? Its episodes end now.`} />`}</div>
    ${data.remarks.length ? html`<ul class="remarks">${data.remarks.map((one) => html`<li key=${one}>${harmless(one)}</li>`)}</ul>` : null}
    <${Panel} title="Samples" name="samples"><${Table} label="Samples" columns=${columns(data)} rows=${data.samples} id=${(row) => row.sample} initial="sample" empty="It has not started." tone=${(row) => (row.failure ? "bad" : "")} /><//>
    <div class="columns">${data.policies.map((policy) => html`<${Verdict} key=${policy.policy} policy=${policy} />`)}
      <${Panel} title="Task"><${Facts} items=${[
        ["Source", harmless(data.source)], ["Task id", harmless(data.task_id)], ["Item", harmless(data.item_id)], ["Epoch", number(data.epoch)],
        ["Agent", harmless(data.agent)], ["Environment", harmless(data.environment)], ["Tenant", harmless(data.tenant)],
        ["Submitted", clock(data.submitted_at)], ["Ended", clock(data.ended_at)], ["Closed by", data.closed_by ? words(data.closed_by) : null],
        ...Object.entries(data.labels).map(([name, value]) => [harmless(name), harmless(value)])]} /><//></div>
    <${Panel} title="Payload"><div class="inside"><${Text} value=${data.payload} label="Payload" /></div><//>
    ${data.artifacts.length ? html`<${Panel} title="Artifacts"><div class="inside artifacts">${data.artifacts.map((one) => html`<${Artifact} key=${one.sha256} artifact=${one} />`)}</div><//>` : null}`}<//>`;
}
