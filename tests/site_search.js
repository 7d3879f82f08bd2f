// Answers queries as the search of the site does: prints the pages of each query's results, best first, as JSON.
// Arguments: the folder of the site, and queries. Its worker and docs/assets/search.js run as they do in a browser.
const fs = require("fs"), path = require("path"), vm = require("vm")
const [folder, ...queries] = process.argv.slice(2)
const workers = path.join(folder, "assets/javascripts/workers")
const worker = fs.readdirSync(workers).find(name => /^search\..*\.js$/.test(name))
const answers = []
let handle
const self = vm.createContext({ console, postMessage: answer => answers.push(answer), addEventListener: (_, fn) => (handle = fn) })
self.self = self
vm.runInContext(fs.readFileSync(path.join(workers, worker), "utf8"), self)
class Worker { postMessage(message) { this.handled = handle({ data: message }) } }
const page = vm.createContext({ Worker })
vm.runInContext(fs.readFileSync(path.join(folder, "assets/search.js"), "utf8"), page)

async function main() {
  const search = new Worker(), index = JSON.parse(fs.readFileSync(path.join(folder, "search/search_index.json"), "utf8"))
  for (const message of [{ type: 0, data: { ...index, options: {} } }, ...queries.map(data => ({ type: 2, data }))]) {
    search.postMessage(message)
    await search.handled
  }
  const pages = answers.slice(1).map(answer => answer.data.items.map(results => results[0].location.replace(/#.*/, "")))
  console.log(JSON.stringify(pages))
}
main()
