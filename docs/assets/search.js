// The search excludes pages with a word that follows "-", and takes "import-hf" for two words of which one suffices.
// Here "--max_tokens=200" means the flag, so that flags can be pasted, and names with hyphens or dots mean all of their parts.
const post = Worker.prototype.postMessage
const readNames = query =>
  query.replace(/(^|\s)--([\w-]+)(=\S*)?/g, "$1$2").replace(/(?<![^\s])\w+([-.]\w+)+(?!\S)/g, '"$&"')
Worker.prototype.postMessage = function (message, ...others) {
  const query = message.data
  return post.call(this, typeof query === "string" ? { ...message, data: readNames(query) } : message, ...others)
}
